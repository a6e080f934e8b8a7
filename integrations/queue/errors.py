"""The queue's own errors, in the form and with the status that our servers give theirs (`api/http/errors.py`)."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from api.http.errors import ApiError, dialect, written


def content(error: ApiError, method: str = "", path: str = "") -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error in the dialect of a request."""
    return written(error, method, path, overload_status="429")


def event(error: ApiError, method: str, path: str) -> bytes:
    """Return an error as the last event of a stream."""
    head = {"tgi": "data:", "messages": "event: error\ndata: "}.get(dialect(method, path), "data: ")
    return f"{head}{json.dumps(content(error, method, path)[1])}\n\n".encode()


def response(error: ApiError, method: str = "", path: str = "") -> web.Response:
    """Return the answer to a request of this method and path, in its dialect."""
    status, body = content(error, method, path)
    return web.json_response(body, status=status, headers=error.headers)

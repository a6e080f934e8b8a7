"""Errors of the queue itself, in the form and with the status that our servers give theirs (`api/http/errors.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from fleet import bodies

TGI_TYPES = {
    "cancelled": "incomplete_generation", "invalid_request_error": "validation", "server_error": "generation",
    "timeout_error": "timeout", "unavailable_error": "healthcheck",
}  # fmt: skip
STATUSES = {"tgi": {400: 422, 499: 500, 500: 424}, "messages": {503: 529}}


class Failed(Exception):
    """A request that the queue answers itself, with an error."""

    def __init__(
        self, status: int, message: str, type: str = "invalid_request_error", retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.type = status, type
        self.retry_after = 1 if retry_after is None and status == 503 else retry_after


def unavailable(message: str) -> Failed:
    """Return the error of a request that may succeed later."""
    return Failed(503, message, "unavailable_error")


def content(failed: Failed, dialect: str = "openai") -> dict[str, Any]:
    """Return the body of an error; it is also the last event of a failed stream."""
    if dialect == "tgi":
        return {"error": str(failed), "error_type": TGI_TYPES.get(failed.type, failed.type)}
    if dialect == "ollama":
        return {"error": str(failed)}
    if dialect == "messages":
        kind = "overloaded_error" if failed.status == 503 else failed.type
        return {"type": "error", "error": {"type": kind, "message": str(failed)}}
    return {"error": {"message": str(failed), "type": failed.type, "param": None, "code": None}}


def event(content: Mapping[str, Any], dialect: str) -> bytes:
    """Return the content of an error as the last event of a stream."""
    head = {"tgi": "data:", "messages": "event: error\ndata: "}.get(dialect, "data: ")
    return f"{head}{json.dumps(content)}\n\n".encode()


def response(failed: Failed, method: str = "", path: str = "") -> web.Response:
    """Return the answer to a request of this method and path, in its dialect."""
    dialect = bodies.dialect(method, path)
    status = STATUSES.get(dialect, {}).get(failed.status, failed.status)
    headers = None if failed.retry_after is None else {"Retry-After": str(failed.retry_after)}
    return web.json_response(content(failed, dialect), status=status, headers=headers)

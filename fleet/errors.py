"""Errors of the ingress itself, in the form and with the status that the replicas give theirs (`api/http/errors.py`)."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from fleet import bodies

TGI_TYPES = {
    "cancelled": "incomplete_generation", "invalid_request_error": "validation", "server_error": "generation",
    "timeout_error": "timeout", "unavailable_error": "healthcheck",
}  # fmt: skip
TGI_STATUS = {400: 422, 499: 500, 500: 424}


class Failed(Exception):
    """A request that the ingress answers itself, with an error."""

    def __init__(self, status: int, message: str, type: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.type = status, type


def unavailable(message: str) -> Failed:
    """Return the error of a request that may succeed later."""
    return Failed(503, message, "unavailable_error")


def content(failed: Failed, is_tgi: bool) -> dict[str, Any]:
    """Return the body of an error; it is also the last event of a failed stream."""
    if is_tgi:
        return {"error": str(failed), "error_type": TGI_TYPES.get(failed.type, failed.type)}
    return {"error": {"message": str(failed), "type": failed.type, "param": None, "code": None}}


def response(failed: Failed, method: str = "", path: str = "") -> web.Response:
    """Return the answer to a request of this method and path, in its dialect."""
    is_tgi = bodies.is_tgi(method, path)
    status = TGI_STATUS.get(failed.status, failed.status) if is_tgi else failed.status
    headers = {"Retry-After": "1"} if status == 503 else None
    return web.json_response(content(failed, is_tgi), status=status, headers=headers)

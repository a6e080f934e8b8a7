"""One table of errors for all dialects (WIRE.md, section 7): what is wrong, the value, the bound, the remedy."""

from __future__ import annotations

from flask import Response, jsonify
from werkzeug.exceptions import HTTPException

from batching import InferenceError

STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "overloaded": 429,
    "cancelled": 499,
    "server_error": 500,
    "unavailable_error": 503,
    "timeout_error": 504,
}
LONGEST_VALUE = 100


class ApiError(Exception):
    """An answer other than 200, with the parameter it is about and OpenAI's kind of code."""

    def __init__(
        self,
        message: str,
        *,
        type: str = "invalid_request_error",
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.type = type
        self.status = status or STATUS[type]
        self.param = param
        self.code = code
        self.retry_after = retry_after


def shown(value: object) -> str:
    """Return a value for a message: its repr, cut to a length that cannot flood a log."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def from_inference(error: InferenceError) -> ApiError:
    return ApiError(str(error), type=error.kind, retry_after=error.retry_after)


def from_http(error: HTTPException) -> ApiError:
    """Return flask's own refusal (unknown path, wrong method) as one of ours."""
    status = error.code or 500
    type = {404: "not_found_error", 500: "server_error"}.get(status, "invalid_request_error")
    remedy = {404: " See GET /openapi.json for the routes", 405: " See the Allow header"}.get(
        status, ""
    )
    return ApiError(f"{error.name}.{remedy}", type=type, status=status)


def response(error: ApiError) -> Response:
    """Return an error in the form of the native and OpenAI dialects."""
    result = jsonify(
        error={
            "message": str(error), "type": error.type, "param": error.param, "code": error.code
        }
    )  # fmt: skip
    result.status_code = error.status
    if error.retry_after is not None or error.status in (429, 503):
        result.headers["Retry-After"] = str(error.retry_after or 1)
    return result

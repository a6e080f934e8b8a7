"""The errors of all dialects in one table (see docs/api.md), with value, bound and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any

from flask import Response, current_app, g, jsonify, request
from werkzeug.exceptions import HTTPException

from batching import InferenceError

STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "overloaded": 429,
    "cancelled": 499,
    "server_error": 500,
    "unavailable_error": 503,
    "out_of_memory": 503,
    "timeout_error": 504,
}
TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"})  # POST only
# Of paths, with the dialect whose errors they have.
PREFIXES = {"/v1/messages": "messages", "/api/v1/": "openai", "/api/": "ollama"}
STATUSES = {"tgi": {400: 422, 499: 500, 500: 424}, "messages": {503: 529}}  # by dialect, where they differ
TGI_TYPE = {
    "invalid_request_error": "validation",
    "cancelled": "incomplete_generation",
    "server_error": "generation",
    "unavailable_error": "healthcheck",
    "timeout_error": "timeout",
}
MESSAGES_TYPE = {  # by status
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 499: "api_error", 500: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
LONGEST_VALUE = 100
MOST_PARTS = 10  # of a path for which a similar one is searched


class ApiError(Exception):
    """An error response, with OpenAI's error type and the parameter at fault."""

    def __init__(
        self,
        message: str,
        *,
        type: str = "invalid_request_error",
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.type = type
        self.status = status or STATUS[type]
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if self.status in (429, 503):
            self.headers["Retry-After"] = str(retry_after or 1)
        if self.status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


def shown(value: object) -> str:
    """Return a JSON value for a message, truncated so that it cannot flood a log.

    Only the beginning is formatted, because a value may have a megabyte.
    """
    if isinstance(value, str):
        text = repr(value[: LONGEST_VALUE + 1])
    else:
        text = "".join(islice(chain.from_iterable(json.JSONEncoder(default=repr).iterencode(value)), LONGEST_VALUE + 1))
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Put the names of another dialect for those of chat into the errors that are raised within."""
    try:
        yield
    except ApiError as error:
        pattern = rf"\b({'|'.join(names)})\b"
        error.args = (re.sub(pattern, lambda match: names[match[0]], str(error)),)
        error.param = names.get(error.param or "", error.param)
        raise


def from_inference(error: InferenceError) -> ApiError:
    """Convert the error of an inference to an ApiError."""
    code = "out_of_memory" if error.kind == "out_of_memory" else None
    return ApiError(str(error), type=error.kind, code=code, retry_after=error.retry_after)


def from_http(error: HTTPException) -> ApiError:
    """Convert an error of Flask (unknown path, wrong method) to an ApiError."""
    status = error.code or 500
    # Flask's own `path` has one slash at its start, however many were sent.
    path = request.environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
    rules = [*current_app.url_map.iter_rules()]
    # A route of this very path comes first: for Flask, one for any file of a folder has this path, too, and its methods.
    methods = {method for rule in rules if rule.rule == path for method in rule.methods or ()}
    methods = methods or {*(getattr(error, "valid_methods", None) or ())}
    if methods and request.method not in methods:
        allowed = ", ".join(sorted(methods))
        wrong = f"{shown(path)} does not support {shown(request.method)}. Use {allowed}"
        return ApiError(wrong, status=405, headers={"Allow": allowed})
    if status == 404:
        paths = sorted({re.sub(r"<\w+:", "<", rule.rule) for rule in rules})
        near = _nearest_route(path, [known for known in paths if known != path])
        question = f" Did you mean {shown(near)}?" if near else ""
        return ApiError(
            f"path {shown(path)} does not exist.{question} Use one of: {', '.join(paths)}", type="not_found_error"
        )
    type = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(f"{error.name}. Send a plain HTTP/1.1 request", type=type, status=status)


def _nearest_route(path: str, known: list[str]) -> str | None:
    """Return the path that a wrong one probably means: with other slashes, case or prefix, its end, or a typing error."""
    routes = current_app.url_map.bind("")
    for spelled in (path, path.lower()):
        parts = [part.strip() for part in spelled.split("/") if part.strip()]
        if len(path) > LONGEST_VALUE or len(parts) > MOST_PARTS:
            return None
        for first in range(len(parts)):
            rest = "/" + "/".join(parts[first:])
            for candidate in (rest, f"/v1{rest}"):
                if candidate != path and routes.allowed_methods(candidate):
                    return candidate
                if len(below := [route for route in known if route.startswith(f"{candidate}/")]) == 1:
                    return below[0]
    return next(iter(get_close_matches(path, [route for route in known if route != "/"], 1)), None)


def dialect(method: str, path: str) -> str:
    """Return the dialect in which the errors of a request are."""
    if method == "POST" and path in TGI_PATHS:
        return "tgi"
    return next((name for prefix, name in PREFIXES.items() if path.startswith(prefix)), "openai")


def written(error: ApiError, method: str, path: str, overload_status: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error in the dialect of a request."""
    form = dialect(method, path)
    status = int(overload_status) if error.type == "overloaded" else error.status
    status = STATUSES.get(form, {}).get(status, status)
    return status, CONTENTS[form](error, status)


def writer() -> Callable[[ApiError], tuple[int, dict[str, Any]]]:
    """Return what gives errors the status and body of the current request's dialect, also after Flask's context has ended."""
    method, path, config = request.method, request.path, current_app.extensions["service"].config
    return lambda error: written(error, method, path, config.overload_status)


def _messages(error: ApiError, status: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": MESSAGES_TYPE.get(status, "invalid_request_error"), "message": str(error)}
    if error.code is not None:
        unsupported = {"unsupported": [error.param]} if "unsupported" in error.code else {}
        inner["details"] = {"error_code": error.code, **unsupported}
    return {"type": "error", "error": inner}


CONTENTS: dict[str, Callable[[ApiError, int], dict[str, Any]]] = {
    "openai": lambda e, _: {"error": {"message": str(e), "type": e.type, "param": e.param, "code": e.code}},
    "tgi": lambda error, _: {"error": str(error), "error_type": TGI_TYPE.get(error.type, error.type)},
    "ollama": lambda error, _: {"error": str(error)},
    "messages": _messages,
}


def response(error: ApiError) -> Response:
    """Return an error response in the format and with the status of the request's dialect."""
    g.error = error
    status, body = writer()(error)
    result = jsonify(body)
    result.status_code = status
    result.headers.update(error.headers)
    return result

"""The middleware: checks before every request, and accounting after every response.

After its last byte, a request gives back its places, is counted, and gets a line in the access log: lengths and times,
never texts.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

from flask import Request, Response, current_app, g, request
from werkzeug.exceptions import NotFound

from api.hooks import cors
from api.hooks.auth import OPEN, PAGES
from api.http import errors
from api.http.errors import ApiError, shown
from api.http.owner import BACKGROUND, is_reserved
from api.http.registry import RequestContext
from api.schemas import body
from api.service import Service

ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REJECTIONS = {
    401: "key", 403: "cross_site", 404: "not_found", 405: "method", 408: "too_slow", 413: "too_large",
    415: "media_type", 422: "invalid", 400: "invalid",
}  # fmt: skip
# The access log names these only if they fail: pages, probes and viewers ask for them all the time.
QUIET = OPEN | {"/events", "/metrics", "/web/<path:name>", "/lab/", "/lab/<path:name>"}
POLLED = {"/load", "/requests/<id>"}  # by the page, with GET; other methods change something
REJECTED_TYPES = {"overloaded": "queue_full", "unavailable_error": "unavailable"}


def request_id(environ: Mapping[str, Any]) -> str:
    """Return the id of a request: the client's own if it is valid."""
    id = environ.get("HTTP_X_REQUEST_ID", "")
    return id if ID.fullmatch(id) and (BACKGROUND in environ or not is_reserved(id)) else uuid.uuid4().hex


def enter() -> None:
    """Give the request an id, the client's own if it is valid, and reject cross-site requests of browsers."""
    environ = request.environ  # its plain dictionary costs less than Flask's view of the headers
    g.request_id = request_id(environ)
    g.began = time.perf_counter()
    host, app = environ.get("HTTP_HOST"), current_app.extensions
    if not cors.is_trusted(host, app["hosts"]):
        raise ApiError(cors.UNTRUSTED.format(shown(host or "")))
    if environ["PATH_INFO"].startswith("//"):
        raise NotFound  # Flask would treat it as a single slash
    changes = environ["REQUEST_METHOD"] in ("POST", "PUT", "DELETE")
    if changes and cors.crosses(request.headers, app["origins"]):
        raise ApiError(
            "cross-site requests from a browser are not allowed. Use a page served by this server, a client "
            "other than a browser, or add the site's origin to --cors-origins",
            type="permission_error",
        )


def id_headers(method: str, path: str, id: str) -> dict[str, str]:
    """Return the headers that tell a client the id of its request."""
    is_messages = errors.dialect(method, path) == "messages"
    return {"X-Request-Id": id, "Request-Id": id} if is_messages else {"X-Request-Id": id}  # Anthropic's name


def leave(service: Service) -> Callable[[Response], Response]:
    """Return an after-request hook that adds our headers, and ends the request after its last byte."""
    queries = {op.path: op.query for op in service.operations}

    def after_request(response: Response) -> Response:
        state, current = g._get_current_object(), request._get_current_object()  # type: ignore[attr-defined]
        context: RequestContext | None = state.get("context")
        if current.environ.get("QUERY_STRING"):
            _name_ignored_queries(response, queries.get(current.path, ()))
        response.headers.update(id_headers(current.method, current.path, state.request_id))
        ignored = response.headers.get("X-Ignored-Params", "")
        state.n_ignored = ignored.count(",") + 1 if ignored else 0
        if context is not None and (copies := sum(i.first is not None for i in context.inferences)):
            response.headers["X-Deduplicated"] = str(copies)
        sequences = [i.sequence for i in context.inferences] if context is not None else []
        if waits := [seq.estimate.joins_at - seq.arrived_at for seq in sequences if seq.estimate]:
            response.headers["X-Expected-Wait"] = f"{max(waits):.3f}"
        length = None if response.is_streamed else response.content_length
        # Without a reference to the response: the cycle would keep it until the next GC.
        route = current.url_rule.rule if current.url_rule is not None else "other"
        on_close = partial(finish, service, current, route, response.status_code, length, state)
        state.ends_with_response = True
        if response.is_streamed:
            if context is not None:
                context.streams = True
            response.call_on_close(on_close)  # is called even if the generator never starts
        else:
            on_close()
        return response

    return after_request


def _name_ignored_queries(response: Response, known: Any) -> None:
    """Add query parameters without effect to X-Ignored-Params, except on pages, whose scripts may read them."""
    if request.url_rule is None or response.status_code >= 400:
        return
    if request.endpoint not in PAGES and response.mimetype != "text/html":
        named = response.headers.get("X-Ignored-Params")
        body.name_ignored(
            response, [*([named] if named else []), *(name for name in request.args if name not in known)]
        )


def abandon(service: Service) -> Callable[[BaseException | None], None]:
    """Return a teardown hook that ends a request for which no response was made."""

    def teardown_request(error: BaseException | None) -> None:
        if not g.get("ends_with_response") and (context := g.get("context")) is not None:
            service.registry.leave(context)

    return teardown_request


def finish(service: Service, current: Request, route: str, status: int, length: int | None, state: Any) -> None:
    """Give back the places of a request, count it and log it. Flask's context may have ended by then."""
    context: RequestContext | None = state.get("context")
    if context is not None and not service.registry.leave(context):
        return
    gone = context is not None and context.gone
    status = 499 if gone else status
    error: ApiError | None = state.get("error")
    rejected = None if error is None else REJECTED_TYPES.get(error.type, REJECTIONS.get(status))
    outputs = [] if context is None else [len(i.output_ids) for i in context.inferences]
    service.meters.answered(route, status, rejected, state.n_ignored, outputs, state.get("generates", False))
    if not (service.config.access_log and service.serves) or (_is_quiet(current, route) and (status < 400 or gone)):
        return
    record: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "id": state.request_id,
        "client": current.remote_addr,
        "method": current.method if current.method.isalpha() else shown(current.method),
        "route": route,
        "status": status,
        "seconds": round(time.perf_counter() - state.began, 6),
        "bytes_in": current.content_length,
        "bytes_out": length,
    }
    if error is not None:
        record["error"] = error.type
    if context is not None:
        record.update(_lengths(context))
    service.access_log.write(record)


def _is_quiet(current: Request, route: str) -> bool:
    return route in QUIET or (route in POLLED and current.method == "GET")


def _lengths(context: RequestContext) -> dict[str, Any]:
    """Return the log fields about a request's inferences."""
    if not context.inferences:
        return {}
    seqs = [inference.sequence for inference in context.inferences]
    first = min((s.first_token_at for s in seqs if s.first_token_at is not None), default=None)
    began = min((s.scheduled_at for s in seqs if s.scheduled_at is not None), default=None)
    arrived = seqs[0].arrived_at
    reasons = [i.finish_reason or (i.error.kind if i.error else None) for i in context.inferences]
    return {
        "prompt_tokens": len(seqs[0].prompt_ids),
        "output_tokens": sum(len(i.output_ids) for i in context.inferences),
        "choices": len(seqs),
        "finish_reason": reasons[0],
        "queue_s": None if began is None else round(began - arrived, 6),
        "ttft_s": None if first is None else round(first - arrived, 6),
        "streams": context.streams,
    }

"""The middleware: the headers of every response, and the accounting after it.

After its last byte, a request gives back its places, is counted, and gets a line in the access log: lengths and times,
never texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any

from flask import Request, Response, g, request

from api.hooks import cors
from api.hooks.admission import OPEN, PAGES
from api.http.errors import ApiError, shown
from api.http.registry import RequestContext
from api.schemas import body
from api.service import Service

REJECTIONS = {
    401: "key", 403: "cross_site", 404: "not_found", 405: "method", 408: "too_slow", 413: "too_large",
    415: "media_type", 422: "invalid", 400: "invalid",
}  # fmt: skip
# The access log names these only if they fail: pages and viewers ask for them all the time.
QUIET = {"/events", "/metrics", "/web/<path:name>", "/lab/", "/lab/<path:name>"}
POLLED = {"/load", "/requests/<id>"}  # by the page, with GET; other methods change something
REJECTED_TYPES = {"overloaded": "queue_full", "unavailable_error": "unavailable"}


def id_headers(path: str, id: str) -> dict[str, str]:
    """Return the headers that tell a client the id of its request."""
    is_messages = path.startswith("/v1/messages")
    return {"X-Request-Id": id, "Request-Id": id} if is_messages else {"X-Request-Id": id}  # Anthropic's name


def leave(service: Service) -> Callable[[Response], Response]:
    """Return an after-request hook that adds our headers, and ends the request after its last byte."""
    queries, origins = {op.path: op.query for op in service.operations}, service.origins

    def after_request(response: Response) -> Response:
        state, current = g._get_current_object(), request._get_current_object()  # type: ignore[attr-defined]
        context: RequestContext | None = state.get("context")
        if current.environ.get("QUERY_STRING"):
            _name_ignored_queries(response, queries.get(current.path, ()))
        response.headers.update(id_headers(current.path, state.request_id))
        ignored = response.headers.get("X-Ignored-Params", "")
        state.n_ignored = ignored.count(",") + 1 if ignored else 0
        inferences = context.inferences if context is not None else []
        if copies := [i for i in inferences if i.first is not None]:
            response.headers["X-Deduplicated"] = str(len(copies))
        if waits := [i.sequence.estimate.joins_at - i.sequence.arrived_at for i in inferences if i.sequence.estimate]:
            response.headers["X-Expected-Wait"] = f"{max(waits):.3f}"
        if origins:
            cors.grant(response, origins)
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
    if not (service.config.access_log and service.serves) or not _is_logged(service, current, route, status, gone):
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


def _is_logged(service: Service, current: Request, route: str, status: int, gone: bool) -> bool:
    """Return whether a request gets a line: of probes, which come every second while a model loads, each new status."""
    if route in OPEN:
        before, service.probed[route] = service.probed.get(route, 200), status
        return status != before
    is_quiet = route in QUIET or (route in POLLED and current.method == "GET")
    return not (is_quiet and (status < 400 or gone))


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

"""The middleware: checks before every request, and accounting after every response.

After the response, the request gives back its places, is counted, and gets a line in the access log: lengths and
times, never texts.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any

from flask import Request, Response, g, request
from werkzeug.exceptions import NotFound, SecurityError

from api.http import cors
from api.http.auth import OPEN
from api.http.errors import ApiError, shown
from api.http.registry import RequestContext
from api.service import Service

ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REJECTIONS = {
    401: "key", 403: "cross_site", 404: "not_found", 405: "method", 408: "too_slow", 413: "too_large",
    415: "media_type", 422: "invalid", 400: "invalid",
}  # fmt: skip
REJECTED_TYPES = {"overloaded": "queue_full", "unavailable_error": "unavailable"}


def enter() -> None:
    """Give the request an id, the client's own if it is valid, and reject cross-site requests of browsers."""
    environ = request.environ  # its plain dictionary costs less than Flask's view of the headers
    given = environ.get("HTTP_X_REQUEST_ID", "")
    g.request_id = given if ID.fullmatch(given) else uuid.uuid4().hex
    g.began = time.perf_counter()
    if isinstance(request.routing_exception, SecurityError):
        raise ApiError(
            f"the Host header is {shown(environ.get('HTTP_HOST', ''))}, which is not in --trusted-hosts. "
            "Use a host name from that list, or add this one"
        )
    if environ["PATH_INFO"].startswith("//"):
        raise NotFound  # flask itself would read it as one slash
    changes = environ["REQUEST_METHOD"] in ("POST", "PUT", "DELETE")
    crosses = changes and environ.get("HTTP_SEC_FETCH_SITE") == "cross-site"
    if crosses and cors.allowed_origin() is None:
        raise ApiError(
            "cross-site requests from a browser are not allowed. Use a page served by this server, a client "
            "other than a browser, or add the site's origin to --cors-origins",
            type="permission_error",
        )


def leave(service: Service) -> Callable[[Response], Response]:
    """Return an after-request hook: it sends the request's id, and ends the request after its last byte."""

    def after_request(response: Response) -> Response:
        state, asked = g._get_current_object(), request._get_current_object()
        context: RequestContext | None = state.get("context")
        response.headers["X-Request-Id"] = state.request_id
        ignored = response.headers.get("X-Ignored-Params", "")
        state.n_ignored = ignored.count(",") + 1 if ignored else 0
        length = None if response.is_streamed else response.content_length
        # Not with the response itself: a cycle would keep it until the next GC.
        see_off = partial(_see_off, service, asked, response.status_code, length, state)
        state.departs = True
        if response.is_streamed:  # its generator may never start: this is called all the same
            if context is not None:
                context.streams = True
            response.call_on_close(see_off)
        else:
            see_off()
        return response

    return after_request


def abandon(service: Service) -> Callable[[BaseException | None], None]:
    """Return a teardown hook that ends a request unless its response does."""

    def teardown_request(error: BaseException | None) -> None:
        context: RequestContext | None = g.get("context")
        if context is not None and not g.get("departs"):
            service.requests.leave(context)

    return teardown_request


def _see_off(service: Service, asked: Request, status: int, length: int | None, state: Any) -> None:
    """End a request: give back its places, count it and log it. Its context may be gone by then."""
    context: RequestContext | None = state.get("context")
    if context is not None and not service.requests.leave(context):
        return
    gone = context is not None and context.gone
    status = 499 if gone else status
    route = asked.url_rule.rule if asked.url_rule is not None else "other"
    error: ApiError | None = state.get("refusal")
    rejected = None if error is None else REJECTED_TYPES.get(error.type, REJECTIONS.get(status))
    outputs = [] if context is None else [len(i.output_ids) for i in context.inferences]
    service.meters.answered(route, status, rejected, state.n_ignored, outputs, state.get("generates", False))
    if not (service.config.access_log and service.serves) or (route in OPEN and status == 200):
        return
    record: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "id": state.request_id,
        "client": asked.remote_addr,
        "method": asked.method if asked.method.isalpha() else shown(asked.method),
        "route": route,
        "status": status,
        "seconds": round(time.perf_counter() - state.began, 6),
        "bytes_in": asked.content_length,
        "bytes_out": length,
    }
    if error is not None:
        record["error"] = error.type
    if context is not None:
        record.update(_lengths(context))
    service.access_log.write(record)


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

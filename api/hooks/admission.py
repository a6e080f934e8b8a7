"""Admission: each generating request takes a place before its body is read.

A rejection is cheap and waits for nothing. The places are those of the inbox: as many as requests may be queued or
running, so HTTP threads remain for health checks and rejections. This module must not know what a request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flask import g, request

from api.http.errors import ApiError, from_inference, shown
from api.http.owner import is_background
from api.http.registry import RequestContext
from api.service import Service

PLACE = "effective_batching.place"  # in the WSGI environment: the place that the worker has taken for this request


def check(service: Service) -> Callable[[], None]:
    """Return a before-request hook that takes a place for a generating request."""

    def before_request() -> None:
        environ = request.environ
        if f"{environ['REQUEST_METHOD']} {request.path}" not in service.generating:
            return
        g.generates = True
        service.meters.arrived()
        context = enter(service)
        if "HTTP_X_QUEUE_TIMEOUT" in environ:
            context.queue_timeout = _seconds("X-Queue-Timeout")
        if "HTTP_X_REQUEST_TIMEOUT" in environ:
            context.request_timeout = _seconds("X-Request-Timeout")

    return before_request


def enter(service: Service) -> RequestContext:
    """Take a place for the current request, which keeps it until its last byte is sent and the loop has let go of it."""
    if service.draining:
        raise ApiError("the server is shutting down. Try again later, or use another server", type="unavailable_error")
    if service.engine is None:  # there is no inbox to have places in
        status, reason = service.status()
        raise ApiError(f"the server is {status}: {reason}. Try again", type="unavailable_error")
    place = None
    if not is_background():
        inbox = service.engine.manager.inbox
        place = request.environ.get(PLACE) or inbox.places.lend()
        if place is None:
            raise from_inference(inbox.full_error(1))
    context = service.registry.enter(g.request_id, place, is_background=is_background())
    g.context = context
    return context


def take_more(service: Service, n: int) -> None:
    """Take `n` more places for the other prompts and choices of the current request, all or none."""
    place = g.context.place
    if n > 0 and place is not None and not place.take_more(n):
        assert service.engine is not None  # which lent the first place
        raise from_inference(service.engine.manager.inbox.full_error(n))


def _seconds(header: str) -> float:
    text = request.headers[header]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ApiError(
            f"the header {header} is {shown(text)}, but must be a number of seconds above 0. Send one, or leave it out",
            param=header,
        )
    return value

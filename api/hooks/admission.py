"""Admission: each generating request takes a place before its body is read.

A rejection is cheap and waits for nothing. There are as many places as requests may be queued or running, so HTTP
threads remain for health checks and rejections. This module must not know what a request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flask import g, request

from api.http.errors import ApiError, shown
from api.http.owner import is_background
from api.http.registry import RequestContext
from api.service import Service

HAS_PLACE = "effective_batching.has_place"  # in the WSGI environment: the server has taken a place for this request


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
    """Take a place for the current request, which keeps it until its last byte is sent."""
    if service.draining:
        raise ApiError("the server is shutting down. Try again later, or use another server", type="unavailable_error")
    if is_background():
        context = service.requests.enter(g.request_id, lambda places: None, is_background=True)
        g.context = context
        return context
    if request.environ.get(HAS_PLACE):
        request.environ[HAS_PLACE] = False  # the context releases it from now on
    else:
        take(service, 1)
    context = service.requests.enter(g.request_id, service.places.give_back)
    g.context = context
    return context


def take(service: Service, n: int) -> None:
    """Take `n` places, or raise ApiError with the time after which to retry."""
    if not service.places.take(n):
        raise ApiError(
            f"the server is full ({service.places.taken} requests queued or running, this one adds {n}, "
            f"limit {service.places.total}). Try again later, or raise --max-queue",
            type="overloaded",
            retry_after=service.retry_after(),
        )


def take_more(service: Service, n: int) -> None:
    """Take `n` more places for the other prompts and choices of the current request, all or none."""
    context = g.get("context")
    if context is not None and n > 0 and not context.is_background:
        take(service, n)
        context.places += n


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

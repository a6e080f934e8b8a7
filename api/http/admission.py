"""Who may come in: a place for each request that generates, taken before its body is read.

Refusing costs nothing and waits for nobody. Places are as many as may wait or run, so that there is always an HTTP
thread left for health and refusals. It must not know what is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flask import g, request

from api.http.errors import ApiError, shown
from api.http.registry import Visit
from api.service import Service

HAS_PLACE = "effective_batching.has_place"  # in the WSGI environment: the server took a place for this request


def check(service: Service, generating: frozenset[tuple[str, str]]) -> Callable[[], None]:
    """Return what to do before each request: those of the `generating` methods and paths need a place."""

    def before_request() -> None:
        environ = request.environ
        path = request.path
        if (environ["REQUEST_METHOD"].lower(), path) not in generating:
            return
        g.generates = True
        service.meters.arrived()
        visit = enter(service)
        if "HTTP_X_QUEUE_TIMEOUT" in environ:
            visit.may_wait = _seconds("X-Queue-Timeout")
        if "HTTP_X_REQUEST_TIMEOUT" in environ:
            visit.may_take = _seconds("X-Request-Timeout")

    return before_request


def enter(service: Service) -> Visit:
    """Take a place for the present request, which keeps it until its last byte is out."""
    if service.draining:
        raise ApiError(
            "the server is shutting down. Try again later, or use another server",
            type="unavailable_error",
        )
    if request.environ.get(HAS_PLACE):
        request.environ[HAS_PLACE] = False  # it is the visit's now
    else:
        take(service, 1)
    visit = service.visits.enter(g.request_id, request.path, service.places.give_back)
    g.visit = visit
    return visit


def take(service: Service, n: int) -> None:
    """Take `n` places, or refuse with the time to come again."""
    if not service.places.take(n):
        raise ApiError(
            f"the server is full ({service.places.taken} requests queued or running, this one adds {n}, "
            f"limit {service.places.total}). Try again later, or raise --max-queue",
            type="overloaded",
            retry_after=service.retry_after(),
        )


def take_more(service: Service, n: int) -> None:
    """Take `n` further places for the other prompts and choices of the present request, all or none."""
    visit = g.get("visit")
    if visit is not None and n > 0:
        take(service, n)
        visit.places += n


def _seconds(header: str) -> float:
    text = request.headers[header]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ApiError(
            f"the header {header} is {shown(text)}, but must be a number of seconds above 0. "
            "Send one, or leave it out",
            param=header,
        )
    return value

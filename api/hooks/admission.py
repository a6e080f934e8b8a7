"""Admission: what every request passes before its handler and before its body is read, from top to bottom.

A generating request takes a place. A rejection is cheap and waits for nothing. The places are those of the inbox: as many
as requests may be queued or running, so HTTP threads remain for health checks and rejections. This module must not know
what a request asks for.
"""

from __future__ import annotations

import hmac
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from flask import Response, g, request
from werkzeug.exceptions import NotFound

from api.hooks import cors
from api.http.errors import ApiError, from_inference, shown
from api.http.owner import BACKGROUND, credentials, current_owner, is_reserved
from api.http.registry import RequestContext
from api.pages import dashboard
from api.service import Service

PLACE = "effective_batching.place"  # in the WSGI environment: the place that the worker has taken for this request
ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
OPEN = frozenset({"/health", "/healthz", "/ping", "/ready", "/health/live", "/health/ready"})  # without a key
PAGES = frozenset({"dashboard.asset", "dashboard.race", "dashboard.lab", "dashboard.lab_asset"})
CHANGING = frozenset({"POST", "PUT", "DELETE"})


def admit(service: Service) -> Callable[[], Response | None]:
    """Return the before-request hook: it gives a request an id, and raises an error or answers if it may not get in."""
    key, hosts, origins = service.config.api_key, service.hosts, service.origins

    def before_request() -> Response | None:
        environ = request.environ  # its plain dictionary costs less than Flask's view of the headers
        g.request_id = request_id(environ)
        g.began = time.perf_counter()
        if hosts is not None and not cors.is_trusted(environ.get("HTTP_HOST"), hosts):
            raise ApiError(cors.UNTRUSTED.format(shown(environ.get("HTTP_HOST") or "")))
        if environ["PATH_INFO"].startswith("//"):
            raise NotFound  # Flask would treat it as a single slash
        if environ["REQUEST_METHOD"] in CHANGING and crosses(environ, origins):
            raise ApiError(
                "cross-site requests from a browser are not allowed. Use a page served by this server, a client "
                "other than a browser, or add the site's origin to --cors-origins",
                type="permission_error",
            )
        if origins and (granted := cors.preflight(origins)) is not None:
            return granted  # a preflight has no key
        if key and _needs_key(environ) and not has_key(environ, key):
            raise ApiError(
                "the API key is missing or wrong. Send the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                type="authentication_error",
            )
        if f"{environ['REQUEST_METHOD']} {request.path}" in service.generating:
            g.generates = True
            service.meters.arrived()
            context = enter(service)
            if "HTTP_X_QUEUE_TIMEOUT" in environ:
                context.queue_timeout = _seconds("X-Queue-Timeout")
            if "HTTP_X_REQUEST_TIMEOUT" in environ:
                context.request_timeout = _seconds("X-Request-Timeout")
        return None

    return before_request


def request_id(environ: Mapping[str, Any]) -> str:
    """Return the id of a request: the client's own if it is valid."""
    id: str = environ.get("HTTP_X_REQUEST_ID", "")
    is_valid = id and ID.fullmatch(id) and (BACKGROUND in environ or not is_reserved(id))
    return id if is_valid else uuid.uuid4().hex


def crosses(environ: Mapping[str, Any], origins: frozenset[str]) -> bool:
    """Return whether a page of another origin, which is not among these, sends a request from a browser."""
    origin, site = environ.get("HTTP_ORIGIN"), environ.get("HTTP_SEC_FETCH_SITE")
    return (origin or site) is not None and cors.crosses(origins, origin, site, environ.get("HTTP_HOST"))


def _needs_key(environ: Mapping[str, Any]) -> bool:
    """Return whether the current request needs the key: an unknown path is 404 and a wrong method 405 without it, too."""
    if BACKGROUND in environ or request.path in OPEN or request.routing_exception is not None:
        return False
    # The live page asks for the key itself.
    return request.endpoint not in PAGES and not (request.path == "/" and dashboard.wants_page())


def has_key(environ: Mapping[str, Any], key: str) -> bool:
    """Return whether a request sends this key; it is compared in constant time."""
    scheme, _, sent = credentials(environ).partition(" ")
    return scheme == "Bearer" and hmac.compare_digest(sent.encode("utf-8", "replace"), key.encode())


def enter(service: Service) -> RequestContext:
    """Take a place for the current request, which keeps it until its last byte is sent and the loop has let go of it."""
    if service.draining:
        raise ApiError("the server is shutting down. Try again later, or use another server", type="unavailable_error")
    if service.engine is None:  # there is no inbox to have places in
        status, reason = service.status()
        raise ApiError(f"the server is {status}: {reason}. Try again", type="unavailable_error")
    place, is_background = None, BACKGROUND in request.environ
    if not is_background:
        inbox = service.engine.manager.inbox
        place = request.environ.get(PLACE) or inbox.places.lend()
        if place is None:
            raise from_inference(inbox.full_error(1))
    tenant = current_owner() if service.config.dedup == "per-key" else ""
    context = service.registry.enter(g.request_id, place, is_background=is_background, tenant=tenant)
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

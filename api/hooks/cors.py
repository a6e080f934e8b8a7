"""CORS: --cors-origins lists the origins whose pages may use this server from a browser.

By default this module does nothing. Origins are compared as a whole, by the rule that also admits their requests. The
server uses no cookies, so credentials are never allowed: a page sends the API key itself.
"""

from __future__ import annotations

import re

from flask import Flask, Response, current_app, request

METHODS = "GET, HEAD, POST, PUT, DELETE"
EXPOSED = "X-Request-Id, X-Ignored-Params, X-Deduplicated, X-Expected-Wait, Retry-After"  # headers that a page may read
MAX_AGE = "600"  # seconds for which a browser may remember a preflight
HEADERS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")


def install(app: Flask, origins: frozenset[str]) -> None:
    """Allow pages of these origins. Install this before the key check, because preflights have no key."""
    app.extensions["origins"] = origins
    if origins:
        app.before_request(_preflight)
        app.after_request(_grant)


def allowed_origin() -> str | None:
    """Return the origin that may read the current response, * for any, or None."""
    return _allowed(current_app.extensions["origins"], request.headers.get("Origin"))


def _allowed(origins: frozenset[str], origin: str | None) -> str | None:
    return "*" if "*" in origins else origin if origin in origins else None


def headers(origins: frozenset[str], origin: str | None) -> dict[str, str]:
    """Return the headers that let a page of an allowed origin read a response without a Vary header."""
    allowed = _allowed(origins, origin)
    granted = {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": EXPOSED} if allowed else {}
    return granted | {"Vary": "Origin"} if origins and allowed != "*" else granted


def _preflight() -> Response | None:
    """Answer a preflight request; any other OPTIONS request is not allowed."""
    if (
        request.method != "OPTIONS"
        or "Access-Control-Request-Method" not in request.headers
        or allowed_origin() is None
    ):
        return None
    response = Response(status=204)
    response.headers["Access-Control-Allow-Methods"] = METHODS
    response.headers["Access-Control-Max-Age"] = MAX_AGE
    headers = request.headers.get("Access-Control-Request-Headers", "")
    if HEADERS.fullmatch(headers):
        response.headers["Access-Control-Allow-Headers"] = headers
    return response


def _grant(response: Response) -> Response:
    """Allow a page of an allowed origin to read the response."""
    granted = headers(current_app.extensions["origins"], request.headers.get("Origin"))
    vary = granted.pop("Vary", None)
    response.headers.update(granted)
    if vary:
        response.vary.add(vary)
    return response

"""CORS: which other sites' pages a browser lets use this server, by --cors-origins.

By default nothing is sent and nothing here runs. A site is compared as a whole, by the same rule that lets its requests
in at the door. Cookies mean nothing to this server, so no credentials are ever allowed: a page sends the key itself.
"""

from __future__ import annotations

import re

from flask import Flask, Response, current_app, request

METHODS = "GET, HEAD, POST, PUT, DELETE"
EXPOSED = "X-Request-Id, X-Ignored-Params, Retry-After"  # what a page may read beside the body
MAX_AGE = "600"  # seconds for which a browser need not ask again
HEADERS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")


def install(app: Flask, origins: frozenset[str]) -> None:
    """Let pages of these origins use the server; call it before what asks for the key, which no preflight has."""
    app.extensions["origins"] = origins
    if origins:
        app.before_request(_preflight)
        app.after_request(_grant)


def allowed_origin() -> str | None:
    """Return the origin to which the present answer is granted, * for any; None when its page may not read it."""
    origins: frozenset[str] = current_app.extensions["origins"]
    origin = request.headers.get("Origin")
    return "*" if "*" in origins else origin if origin in origins else None


def _preflight() -> Response | None:
    """Answer a browser that asks whether a page may send what it wants to; any other OPTIONS is no method here."""
    if (
        request.method != "OPTIONS"
        or "Access-Control-Request-Method" not in request.headers
        or allowed_origin() is None
    ):
        return None
    response = Response(status=204)
    response.headers["Access-Control-Allow-Methods"] = METHODS
    response.headers["Access-Control-Max-Age"] = MAX_AGE
    asked = request.headers.get("Access-Control-Request-Headers", "")
    if HEADERS.fullmatch(asked):
        response.headers["Access-Control-Allow-Headers"] = asked
    return response


def _grant(response: Response) -> Response:
    """Let the page read an answer, a refusal, or a stream."""
    origin = allowed_origin()
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = EXPOSED
    if origin != "*":
        response.vary.add("Origin")
    return response

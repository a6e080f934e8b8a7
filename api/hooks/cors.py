"""CORS: --cors-origins lists the origins whose pages may use this server from a browser.

By default this module does nothing. Origins are compared as a whole, by the rule that also admits their requests. The
server uses no cookies, so credentials are never allowed: a page sends the API key itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from flask import Response, request

METHODS = "GET, HEAD, POST, PUT, DELETE"
EXPOSED = "X-Request-Id, X-Ignored-Params, X-Deduplicated, X-Expected-Wait, Retry-After"  # headers that a page may read
MAX_AGE = "600"  # seconds for which a browser may remember a preflight
PORT = re.compile(r":\d*$")
UNTRUSTED = "the Host header is {}, by which this server does not go. Use localhost, or add the name to --trusted-hosts"
HEADERS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")


def _allowed(origins: frozenset[str], origin: str | None) -> str | None:
    return "*" if "*" in origins else origin if origin in origins else None


def is_trusted(host: str | None, names: Collection[str] | None) -> bool:
    """Return whether a Host header has one of these names; one that begins with a dot includes its subdomains."""
    if host is None or names is None:
        return True
    name = PORT.sub("", host.lower())
    return name in names or any(one.startswith(".") and f".{name}".endswith(one) for one in names)


def crosses(origins: frozenset[str], origin: str | None, site: str | None, host: str | None) -> bool:
    """Return whether a page of another origin, which is not among these, sends a request from a browser.

    `origin`, `site` and `host` are the headers Origin, Sec-Fetch-Site, which browsers send over safe connections only, and
    Host.
    """
    if site in ("same-origin", "none") or _allowed(origins, origin):
        return False
    return site is not None or (origin is not None and origin.partition("://")[2] != host)


def headers(origins: frozenset[str], origin: str | None) -> dict[str, str]:
    """Return the headers that let a page of an allowed origin read a response without a Vary header."""
    allowed = _allowed(origins, origin)
    granted = {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": EXPOSED} if allowed else {}
    return granted | {"Vary": "Origin"} if origins and allowed != "*" else granted


def preflight(origins: frozenset[str]) -> Response | None:
    """Answer a preflight request; any other OPTIONS request is not allowed."""
    if (
        request.method != "OPTIONS"
        or "Access-Control-Request-Method" not in request.headers
        or _allowed(origins, request.headers.get("Origin")) is None
    ):
        return None
    response = Response(status=204)
    response.headers["Access-Control-Allow-Methods"] = METHODS
    response.headers["Access-Control-Max-Age"] = MAX_AGE
    headers = request.headers.get("Access-Control-Request-Headers", "")
    if HEADERS.fullmatch(headers):
        response.headers["Access-Control-Allow-Headers"] = headers
    return response


def grant(response: Response, origins: frozenset[str]) -> None:
    """Allow a page of an allowed origin to read the response."""
    granted = headers(origins, request.headers.get("Origin"))
    vary = granted.pop("Vary", None)
    response.headers.update(granted)
    if vary:
        response.vary.add(vary)

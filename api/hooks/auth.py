"""The API key: compared in constant time, and required on every route except the health checks."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from flask import request

from api.http.errors import ApiError
from api.http.owner import credentials, is_background
from api.pages import dashboard

OPEN = frozenset({"/health", "/healthz", "/ping", "/ready", "/health/live", "/health/ready"})
PAGES = frozenset({"dashboard.asset", "dashboard.race", "dashboard.lab", "dashboard.lab_asset"})


def has_key(environ: Mapping[str, Any], key: str) -> bool:
    """Return whether a request sends this key."""
    scheme, _, sent = credentials(environ).partition(" ")
    return scheme == "Bearer" and hmac.compare_digest(sent.encode("utf-8", "replace"), key.encode())


def check(key: str) -> Callable[[], None]:
    """Return a before-request hook that rejects requests without the key, if one is set."""

    def before_request() -> None:
        if not key or is_background() or request.path in OPEN or request.routing_exception is not None:
            return  # an unknown path is 404 and a wrong method 405, with or without the key
        if request.endpoint in PAGES or (request.path == "/" and dashboard.wants_page()):
            return  # the live page asks for the key itself
        if not has_key(request.environ, key):
            raise ApiError(
                "the API key is missing or wrong. Send the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                type="authentication_error",
            )

    return before_request

"""Whose request the current one is: clients with the same API key are one owner, and see each other's files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from flask import request

BACKGROUND = "effective_batching.background"  # in the WSGI environment of a request of the server itself: its owner


def current_owner() -> str:
    """Return a name for those who hold the key of the current request, from which the key cannot be derived.

    Clients may send any key to a server without one. Those who send none are one owner, whose name is empty.
    """
    if BACKGROUND in request.environ:
        return str(request.environ[BACKGROUND])
    sent = credentials(request.environ)
    return hashlib.sha256(sent.encode("utf-8", "replace")).hexdigest()[:32] if sent else ""


def credentials(environ: Mapping[str, Any]) -> str:
    """Return the Authorization header of a request, or what it would be for the key in X-Api-Key."""
    key = environ.get("HTTP_X_API_KEY")
    return environ.get("HTTP_AUTHORIZATION") or (f"Bearer {key}" if key else "")


def is_reserved(id: str) -> bool:
    """Return whether only lines of batches have such request ids, which a client could otherwise take first."""
    return id.startswith("batch_")

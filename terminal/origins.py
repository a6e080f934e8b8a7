"""Web origins in a setting, as browsers write them. This module must not know who may use what."""

from __future__ import annotations

import re

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # a browser leaves them out of an origin


def read_origins(text: str) -> frozenset[str]:
    """Return the origins in a comma-separated list; ValueError for one that no browser sends."""
    origins = set()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        origin = part.lower()
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{part!r} is not an origin. Use scheme://host or scheme://host:port without a path, "
                "as in https://chat.example.org, or * for any"
            )
        origins.add(origin.removesuffix(DEFAULT_PORTS.get(origin.partition(":")[0], "")))
    return frozenset(origins)


def check_origins(text: str) -> None:
    """Raise ValueError for an origin that no browser sends."""
    read_origins(text)

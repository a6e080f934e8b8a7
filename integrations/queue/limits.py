"""The limits on clients."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Seconds for each part of a request, and the number of connections."""

    receive: float  # for a head from its first byte, and between two reads of a body
    send: float  # in which a client reads nothing of its answer
    connections: int
    idle: float = 75.0  # between two requests, as in launch/gunicorn_conf.py
    body: float = 60.0  # for a whole body

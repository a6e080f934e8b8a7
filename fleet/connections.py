"""The ingress's connections to its replicas, which notice a machine that has vanished.

A model may compute for minutes without sending a byte, so no timeout can tell that from a machine without power or network.
The kernel asks it instead: `IDLE` + `PROBES` * `EVERY` seconds without an answer break the connection.
"""

from __future__ import annotations

import socket
from typing import Any

import aiohttp

IDLE, EVERY, PROBES = 10, 5, 3  # seconds until the first probe, seconds between probes, and their number
CONNECT_SECONDS = 5.0
KEPT_SECONDS = 30.0  # for which an idle connection is kept


def session() -> aiohttp.ClientSession:
    """Return a session that passes requests and answers as they are."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, socket_factory=probing),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def probing(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address of `getaddrinfo` that breaks when nobody answers any more."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": EVERY, "TCP_KEEPCNT": PROBES}
    # Probes are only sent on an idle connection; this is for a request that nobody acknowledges.
    options["TCP_USER_TIMEOUT"] = 1000 * (IDLE + PROBES * EVERY)
    for name, value in options.items():
        if hasattr(socket, name):  # all of them on Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made

"""What passes between a client and an upstream: which headers, over which connections. Pure but for the sockets."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from werkzeug.sansio.utils import host_is_trusted

from front.receiving import ClientLeft

T = TypeVar("T")
Headers = CIMultiDict[str] | CIMultiDictProxy[str]

# What is about one connection, or about the body as it passes there.
HOP = frozenset({
    "connection", "content-length", "date", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
# A model may compute for minutes without sending a byte, so no timeout can tell that from a machine without power or
# network. The kernel asks it instead: IDLE + PROBES * EVERY seconds without an answer break the connection.
IDLE, EVERY, PROBES = 10, 5, 3  # seconds until the first probe, seconds between probes, and their number
CONNECT_SECONDS = 5.0
KEPT_SECONDS = 2.0  # for an idle connection to an upstream: llama.cpp closes them after 5 s
REUSED = "reused"
SHORTEST_SECRET = 8  # characters: a shorter key is in other headers by chance


def passed(headers: Headers, secret: str = "", ours: Iterable[str] = ()) -> CIMultiDict[str]:
    """Return the headers without `ours`, those with a secret, and hop-by-hop ones, including those that `Connection` names.

    Some servers read `Content_Length` as `Content-Length`.
    """
    named = {name.strip().lower() for name in ",".join(headers.getall("Connection", ())).split(",")}
    ends = HOP.union(named, ours)
    kept = ((name, value) for name, value in headers.items() if name.lower().replace("_", "-") not in ends)
    return CIMultiDict((name, value) for name, value in kept if len(secret) < SHORTEST_SECRET or secret not in value)


def is_for(request: web.BaseRequest, hosts: list[str] | None) -> bool:
    """Return whether a request names one of these hosts; None allows any."""
    return hosts is None or host_is_trusted(request.host, hosts)


async def to_client(sending: Awaitable[T]) -> T:
    """Await a write to the client; ClientLeft if it has closed its connection."""
    try:
        return await sending
    except (aiohttp.ClientError, ConnectionError):
        raise ClientLeft from None


def session() -> aiohttp.ClientSession:
    """Return a session that passes requests and answers as they are, and keeps idle connections for KEPT_SECONDS.

    It notes in the `trace_request_ctx` of a request, a set, if the request got a connection that was used before.
    """
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, socket_factory=probing),
        cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not another's
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        trace_configs=[trace],
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


async def _note_reuse(
    session: aiohttp.ClientSession, context: Any, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if isinstance(context.trace_request_ctx, set):
        context.trace_request_ctx.add(REUSED)


def probing(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address of `getaddrinfo` that breaks when the peer stops answering."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": EVERY, "TCP_KEEPCNT": PROBES}
    # Probes are sent only on an idle connection; this covers a request that the peer never acknowledges.
    options["TCP_USER_TIMEOUT"] = 1000 * (IDLE + PROBES * EVERY)
    for name, value in options.items():
        if hasattr(socket, name):  # all of them on Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made

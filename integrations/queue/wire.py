"""Routes, headers and connections between clients and upstreams. Only the connections do I/O."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from integrations.queue.receiving import ClientLeft

T = TypeVar("T")
Headers = CIMultiDict[str] | CIMultiDictProxy[str]

# The upstream's routes that compute, and those that only report. All others, such as those that pull or delete models or
# load adapters, would let any client change the upstream.
QUEUED = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
    "/completion", "/infill", "/embedding", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/generate",
    "/generate_stream", "/inference",
})  # fmt: skip
PASS_THROUGH = frozenset({"/v1/models", "/api/tags", "/api/version", "/api/ps", "/props", "/info", "/version"})
POSTS_THROUGH = frozenset({"POST /v1/messages/count_tokens", "POST /api/show"})
# What a server of this project reports, too.
OF_OWN = frozenset({"POST /tokenize", "POST /detokenize", "GET /docs", "GET /openapi.json"})
STATES = frozenset({"/health", "/metrics", "/slots"})  # of one upstream
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

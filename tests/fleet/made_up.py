"""An ingress in front of servers that the tests make up, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import aiohttp
from aiohttp import web

from fleet import options
from fleet.ingress import Ingress
from fleet.pool import Pool, Replica
from fleet.routers import ROUTERS, Asked
from front import clients
from front.limits import Limits
from tests.support import run_async

LIMITS = Limits(receive=10.0, send=10.0, connections=64)
REPORT = {"running": 0, "waiting": 0, "kv_used": 0.0, "prefill_tokens": 0}
GOOD = {"completion": "good"}
STATS = {"latency-per-token": 0.5, "requests": 2, "total-tokens-handled": 8, "total-elapsed-time": 4.0, "policy": "x"}
ASK = {"prompt": "hello", "num_tokens": 4}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Fixed:
    """A fleet of servers at known addresses; `gone` are left out."""

    def __init__(self, *urls: str, router: str = "round-robin") -> None:
        self.pool = Pool(ROUTERS[router](Random(0)))
        self.replicas = [Replica("ab"[i] if i < 2 else f"r{i}", url) for i, url in enumerate(urls)]
        self.gone: set[str] = set()

    async def choose(self, asked: Asked | None = None) -> list[Replica]:
        self.pool.update((one, {}) for one in self.replicas if one.name not in self.gone)
        return [] if asked is None else self.pool.order(asked)


class Front:
    """The address of an ingress, and what a client does with it."""

    def __init__(self, ingress: Ingress, url: str, session: aiohttp.ClientSession) -> None:
        self.ingress, self.url, self.session = ingress, url, session

    async def post(self, path: str, fields: dict[str, Any], **headers: str) -> tuple[int, bytes]:
        async with self.session.post(self.url + path, json=fields, headers=headers) as answer:
            return answer.status, await answer.read()

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self.session.get(self.url + path, headers=headers, allow_redirects=False) as answer:
            return answer.status, await answer.read()


@asynccontextmanager
async def connected(front: Front) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to an ingress."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return the head of an answer and its body, which has a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length:")]
    return head, await reader.readexactly(int(lengths[0])) if lengths else b""


async def send(front: Front, data: bytes, *, ends: bool = False) -> tuple[str, dict[str, Any]]:
    """Send these bytes, and the end of the sending half if it `ends`; return status line and JSON of the answer."""
    async with connected(front) as (reader, writer):
        writer.write(data)
        if ends:
            writer.write_eof()
        head, body = await read_answer(reader)
        return head.partition("\r\n")[0], json.loads(body)


def posted(path: str, *headers: str, body: bytes = b"", length: int | None = None, version: str = "1.1") -> bytes:
    """Return a request as bytes; with `length` it states another one."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.startswith("Transfer-Encoding") for line in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    """Let a handler answer every request on a free port; yield its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def front(fleet: Fixed, limits: Limits = LIMITS, key: str = "") -> AsyncIterator[Front]:
    ingress = Ingress(fleet, limits, key)
    sock = options.bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with clients.listening(ingress.app(), sock, limits), aiohttp.ClientSession() as session:
        yield Front(ingress, url, session)


def behind(
    test: Callable[[Front], Awaitable[None]], *handlers: Handler, limits: Limits = LIMITS, key: str = ""
) -> None:
    """Run a test with an ingress in front of a server for each handler, which answers every request."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(handler)) for handler in handlers]
            await test(await stack.enter_async_context(front(Fixed(*urls), limits, key)))

    run_async(asyncio.wait_for(run(), 20))


def says(content: Any, status: int = 200, seen: list[Any] | None = None) -> Handler:
    """Return a handler that answers with JSON, and notes the bodies that it gets."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if seen is not None:
            seen.append(json.loads(body) if body else request.path_qs)
        return web.json_response(content, status=status)

    return handle


def waits(release: asyncio.Event) -> Handler:
    """Return a handler that answers once it may."""

    async def handle(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response(GOOD)

    return handle


def breaks(*pieces: bytes, seen: list[Any] | None = None) -> Handler:
    """Return a handler that sends these pieces of a stream and then breaks the connection."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if seen is not None:
            seen.append(json.loads(body))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        for piece in pieces:
            if not answer.prepared:
                await answer.prepare(request)
            await answer.write(piece)
        assert request.transport is not None
        request.transport.abort() if not pieces else request.transport.close()
        return answer

    return handle


def streams(*pieces: bytes) -> Handler:
    """Return a handler that sends these pieces of a stream."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
        return answer

    return handle

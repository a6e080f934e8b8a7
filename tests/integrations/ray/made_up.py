"""The queue of a fleet in front of servers that the tests make up, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from integrations.queue import clients, health
from integrations.queue.door import bind
from integrations.queue.receiving import Limits
from integrations.queue.sites import Site
from integrations.ray import fleet_queue, options
from integrations.ray.fleet_queue import FleetQueue, Found
from routing.autoscalers import Load
from tests.integrations.queue.scripted import connected, decorator
from tests.support import SOON, run_async

LIMITS = Limits(receive=SOON, send=SOON, connections=64)
GOOD = {"completion": "good"}
ASK = {"prompt": "hello", "num_tokens": 4}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Fixed:
    """Replicas at known addresses; `gone` are left out, and `reports` are the last ones."""

    def __init__(self, *urls: str) -> None:
        self.replicas = [("ab"[i] if i < 2 else f"r{i}", url) for i, url in enumerate(urls)]
        self.gone: set[str] = set()
        self.reports: dict[str, dict[str, Any]] = {}
        self.waiting = Load()

    async def find(self) -> list[Found]:
        return [Found(name, url, self.reports.get(name, {})) for name, url in self.replicas if name not in self.gone]

    def report(self, waiting: Load) -> None:
        self.waiting = waiting


class Front:
    """The address of a fleet's queue, and what a client does with it."""

    def __init__(self, queue: FleetQueue, fleet: Fixed, url: str, session: aiohttp.ClientSession) -> None:
        self.queue, self.fleet, self.url, self.session = queue, fleet, url, session

    @property
    def sites(self) -> list[Site]:
        return self.queue.sites.all

    async def until(self, condition: Callable[[], Any]) -> None:
        end = asyncio.get_running_loop().time() + SOON
        while not condition():
            assert asyncio.get_running_loop().time() < end, "it did not happen in time"
            await asyncio.sleep(0.005)

    async def only(self, *names: str) -> None:
        """Have only these replicas there, and wait until the queue knows."""
        self.fleet.gone = {name for name, _ in self.fleet.replicas} - set(names)
        await self.queue.refresh()

    async def post(self, path: str, fields: dict[str, Any], **headers: str) -> tuple[int, bytes]:
        async with self.session.post(self.url + path, json=fields, headers=headers) as answer:
            return answer.status, await answer.read()

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self.session.get(self.url + path, headers=headers, allow_redirects=False) as answer:
            return answer.status, await answer.read()


async def read_answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return the head of an answer and its body, which has a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length:")]
    return head, await reader.readexactly(int(lengths[0])) if lengths else b""


async def send(front: Front, data: bytes) -> tuple[str, dict[str, Any]]:
    """Send these bytes; return status line and JSON of the answer."""
    async with connected(front) as (reader, writer):
        writer.write(data)
        head, body = await read_answer(reader)
        return head.partition("\r\n")[0], json.loads(body)


def posted(path: str, *headers: str, body: bytes = b"", length: int | None = None, version: str = "1.1") -> bytes:
    """Return a request as bytes; with `length` it states another one."""
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
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
async def front(fleet: Fixed, policy: str = "dynamic", limits: Limits = LIMITS, *words: str) -> AsyncIterator[Front]:
    """Serve with the options of these words of a command line; the queue lists its replicas only when it must."""
    usual = [policy, "--router", "round-robin", "--max-batch-size", "8", "--host", "127.0.0.1"]
    plan = replace(options.parse([*usual, *words]), limits=limits)
    queue = FleetQueue(plan, fleet)
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_queue, "LOOK_SECONDS", 600.0)
        patch.setattr(health, "LOOK_SECONDS", SOON)
        async with clients.listening(queue.app(), sock, limits), aiohttp.ClientSession() as session:
            one = Front(queue, fleet, url, session)
            await one.until(lambda: len(queue.manager.engines) == len(fleet.replicas))
            yield one


def behind(
    test: Callable[[Front], Awaitable[None]], *handlers: Handler, policy: str = "dynamic", limits: Limits = LIMITS,
    words: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Run a test with a fleet's queue in front of a server for each handler, which answers every request."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(handler)) for handler in handlers]
            await test(await stack.enter_async_context(front(Fixed(*urls), policy, limits, *words)))

    run_async(asyncio.wait_for(run(), 3 * SOON))


replicated = decorator(behind)


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

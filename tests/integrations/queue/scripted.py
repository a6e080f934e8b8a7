"""A queue in front of an upstream that does what each request tells it: N slots, and a token per step for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from config import Config
from integrations.queue import health
from integrations.queue.clients import listening
from integrations.queue.door import bind
from integrations.queue.server import Queue, Settings
from integrations.queue.sites import Site, Sites
from tests.support import run_async

CHAT = "/v1/chat/completions"
USUAL = Settings(idle=20.0)
SECRET, OWN = "sk-upstream-secret", "eb-own-key"


@dataclass
class Answer:
    """What a client got: `error` is the name of the exception if it broke."""

    status: int = 0
    text: str = ""
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    error: str = ""
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Scripted:
    """The upstream; `seen` are the requests that reached it, in order, with their headers and bodies.

    While `going` is not set, it computes no token.
    """

    def __init__(self, slots: int = 1, step: float = 0.005) -> None:
        self.step, self.slots = step, asyncio.Semaphore(slots)
        self.seen: list[tuple[str, dict[str, str], bytes, str]] = []
        self.running: dict[int, asyncio.Queue[None]] = {}
        self.going = asyncio.Event()
        self.going.set()
        self.ended: dict[str, float] = {}
        self.refusals = 0
        self.closes_next = (
            False  # the connection of the next request, before it is read, as one that was idle for too long
        )
        self.url = ""

    @property
    def tags(self) -> list[str]:
        return [tag for tag, *_ in self.seen]

    async def steps(self) -> None:
        while True:
            await asyncio.sleep(self.step)
            await self.going.wait()
            for waiting in list(self.running.values()):
                waiting.put_nowait(None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asks = json.loads(body) if body.startswith(b"{") else {}
        tag, fault = str(asks.get("tag", "")), asks.get("fault", "")
        self.seen.append((tag, dict(request.headers), body, request.path_qs))
        if fault in ("429", "503") and self.refusals < asks.get("times", 1):
            self.refusals += 1
            headers = {"Retry-After": str(asks.get("after", 0.1))}
            return web.json_response({"error": {"message": "slow down"}}, status=int(fault), headers=headers)
        if fault == "500":
            return web.json_response({"error": "boom"}, status=500)
        if fault == "html":
            return web.Response(text="<html>bad gateway</html>", content_type="text/html", status=502)
        if fault == "redirect":
            return web.Response(status=307, headers={"Location": "http://10.0.0.1/"})
        if fault == "echo":
            return web.Response(status=401, headers={"X-Echo": request.headers.get("Authorization", "")})
        if fault == "raw":
            assert request.transport is not None
            request.transport.write(asks["bytes"].encode())
            request.transport.close()
        if fault == "close" or self.closes_next:
            self.closes_next = False
            assert request.transport is not None
            request.transport.abort()
        if fault == "hang":
            await asyncio.sleep(1000)
        if fault == "big":
            return await self._big(request, asks.get("pieces", 100))
        if request.method == "GET":
            return web.json_response({"data": [{"id": "fake"}], "headers": dict(request.headers)})
        async with self.slots:
            try:
                return await self._generate(request, asks, tag, fault)
            finally:
                self.running.pop(id(request), None)
                self.ended[tag] = time.perf_counter()

    async def _big(self, request: web.Request, pieces: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(pieces):
            await response.write(b"x" * (1 << 20))
        await response.write_eof()
        return response

    async def _generate(self, request: web.Request, asks: dict[str, Any], tag: str, fault: str) -> web.StreamResponse:
        tokens = self.running[id(request)] = asyncio.Queue()
        count = asks.get("real", asks.get("max_tokens", 4))
        if not asks.get("stream"):
            for i in range(count):
                await tokens.get()
                if fault in ("cut", "cuthang") and i == 1:
                    return await self._cut(request, hangs=fault == "cuthang")
            usage = {"prompt_tokens": 7, "completion_tokens": count}
            return web.json_response({"choices": [{"message": {"content": "t " * count}}], "usage": usage})
        if request.path.startswith("/api/"):
            return await self._lines(request, tokens, count, fault)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(count):
            await tokens.get()
            if i == 3 and fault == "midclose":
                assert request.transport is not None
                request.transport.abort()
            if i == 3 and fault == "midhang":
                await asyncio.sleep(1000)
            if i == asks.get("at", 3) and fault == "miderror":
                await response.write(b'data: {"error":{"message":"oom"}}\n\n')
                await response.write_eof()
                return response
            await response.write(event({"choices": [{"delta": {"content": f" t{i}"}}]}))
        await response.write(event({"choices": [{"delta": {}, "finish_reason": "length"}]}))
        if (asks.get("stream_options") or {}).get("include_usage"):
            await response.write(event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _lines(
        self, request: web.Request, tokens: asyncio.Queue[None], count: int, fault: str
    ) -> web.StreamResponse:
        """Answer as Ollama does."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for i in range(count):
            await tokens.get()
            if i == 3 and fault == "midclose":
                assert request.transport is not None
                request.transport.abort()
            await response.write(json.dumps({"message": {"content": f" t{i}"}, "done": False}).encode() + b"\n")
        await response.write(json.dumps({"done": True, "eval_count": count, "prompt_eval_count": 9}).encode() + b"\n")
        await response.write_eof()
        return response

    async def _cut(self, request: web.Request, hangs: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": ')
        if hangs:
            await asyncio.sleep(1000)
        assert request.transport is not None
        request.transport.close()
        return response


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class Front:
    """The address of a queue, and what clients do with it."""

    def __init__(self, queue: Queue, url: str, session: aiohttp.ClientSession, upstreams: list[Scripted]) -> None:
        self.queue, self.url, self.session, self.upstreams = queue, url, session, upstreams
        self.arrived = 0
        count = queue.service.meters.arrived

        def arrived() -> None:
            self.arrived += 1
            count()

        queue.service.meters.arrived = arrived  # type: ignore[method-assign]

    @property
    def upstream(self) -> Scripted:
        return self.upstreams[0]

    async def ask(
        self, headers: dict[str, str] | None = None, path: str = CHAT, *, leaves_after: int = 0, **body: Any
    ) -> Answer:
        """Send a chat that is streamed, unless the body says otherwise."""
        whole = {"messages": [{"role": "user", "content": body.pop("prompt", "hello")}], "stream": True, **body}
        return await self.send("POST", path, headers, json.dumps(whole).encode(), leaves_after=leaves_after)

    async def send(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"", *, leaves_after: int = 0
    ) -> Answer:
        answer, began = Answer(), time.perf_counter()
        try:
            async with self.session.request(
                method, self.url + path, data=io.BytesIO(body) if body else None, headers=headers, allow_redirects=False
            ) as got:
                answer.status, answer.headers = got.status, CIMultiDict(got.headers)
                async for chunk in got.content.iter_any():
                    answer.text += chunk.decode()
                    if leaves_after and answer.text.count("data:") >= leaves_after:
                        got.close()
                        break
        except aiohttp.ClientError as error:
            answer.error = type(error).__name__
        answer.seconds = time.perf_counter() - began
        return answer

    async def all(self, *asks: dict[str, Any], in_order: bool = False) -> list[Answer]:
        """Send chats at once, or each when the one before is queued, with upstreams that compute nothing until all are."""
        tasks = []
        if in_order:
            self.hold()
        for ask in asks:
            arrived = self.arrived
            tasks.append(asyncio.create_task(self.ask(**ask)))
            if in_order:
                await self.until(lambda before=arrived: self.arrived > before)
        if in_order:
            self.go()
        return list(await asyncio.gather(*tasks))

    async def occupied(self, count: int, tokens: int = 40, **body: Any) -> list[asyncio.Task[Answer]]:
        """Take `count` slots, for answers that end one after the other, and hold the upstreams until `go`."""
        self.hold()
        asks = ({"user": "z", "tag": "first", "max_tokens": tokens + 4 * i} | body for i in range(count))
        tasks = [asyncio.create_task(self.ask(**ask)) for ask in asks]
        await self.until(lambda: sum(len(one.running) for one in self.upstreams) == count)
        return tasks

    def hold(self) -> None:
        for upstream in self.upstreams:
            upstream.going.clear()

    def go(self) -> None:
        for upstream in self.upstreams:
            upstream.going.set()

    async def what_if(self, requests: int) -> Any:
        """Return an answer about the last requests, once all are recorded: those may have left before."""
        while True:
            answer = await self.send(
                "POST", "/what-if", {"Content-Type": "application/json"}, b'{"policies": ["dynamic+sjf"]}'
            )
            if answer.status != 404:
                assert answer.status == 200, answer.text
                if answer.json["lanes"][0]["requests"] == requests:
                    return answer.json

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(12_000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not happen in time")

    @property
    def idle(self) -> bool:
        """Whether all requests have ended; each is forgotten last, after it has been counted."""
        manager = self.queue.manager
        taken = manager.running or manager.waiting or manager.inbox.open or manager.inbox.places.taken or manager._turns
        return not taken and not any(site.open for site in self.queue.sites.all)


@asynccontextmanager
async def scripted(slots: int, step: float, port: int = 0) -> AsyncIterator[Scripted]:
    upstream = Scripted(slots, step)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    sock = bind("127.0.0.1", port)
    await web.SockSite(runner, sock).start()
    upstream.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    stepping = asyncio.create_task(upstream.steps())
    try:
        yield upstream
    finally:
        stepping.cancel()
        await runner.cleanup()


@asynccontextmanager
async def queueing(
    upstreams: list[Scripted], policy: str, slots: int | tuple[int, ...], settings: Settings, options: dict[str, Any]
) -> AsyncIterator[Front]:
    each = slots if isinstance(slots, tuple) else (slots,) * len(upstreams)
    usual = options.pop("usual", 0)
    sites = Sites([Site(f"u{i}", one.url, own) for i, (one, own) in enumerate(zip(upstreams, each))], usual=usual)
    config = Config(policy=policy, host="127.0.0.1", max_batch_size=sites.most, **options)
    queue = Queue(config, sites, settings)
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    connector = aiohttp.TCPConnector(limit=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "LOOK_SECONDS", 60.0)  # a pause of the machine is no upstream that is down
        async with listening(queue.app(), sock, queue.limits), aiohttp.ClientSession(connector=connector) as session:
            yield Front(queue, url, session, upstreams)


@asynccontextmanager
async def connected(front: Front) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to a queue that reads no more than it must."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]), limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def before(
    test: Callable[[Front], Awaitable[None]], policy: str = "dynamic", *, slots: int | tuple[int, ...] = 1, step: float = 0.005,
    count: int = 1, settings: Settings = USUAL, **options: Any,
) -> None:  # fmt: skip
    """Run a test with a queue in front of scripted upstreams."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            most = slots if isinstance(slots, int) else max(slots)
            upstreams = [await stack.enter_async_context(scripted(most, step)) for _ in range(count)]
            await test(await stack.enter_async_context(queueing(upstreams, policy, slots, settings, options)))

    run_async(asyncio.wait_for(run(), 180))


def decorator(runner: Callable[..., None]) -> Callable[..., Any]:
    """Return a decorator with the options of a runner of tests, such as `before`, for functions of `front` and pytest's arguments."""
    return lambda *how, **more: partial(_as_test, lambda test: runner(test, *how, **more))


def _as_test(runner: Callable[..., None], test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(**given: Any) -> None:
        runner(partial(test, **given))

    names = inspect.signature(test).parameters
    run.__signature__ = inspect.Signature([names[name] for name in names if name != "front"])  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


queued = decorator(before)

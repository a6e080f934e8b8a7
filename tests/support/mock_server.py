"""A server of known delays on the loopback, in all dialects, for the tests of the client.

It runs on an event loop in a thread of its own. `ttft` passes before the first token, `itl` between two; a
whole answer comes after both. `answer` and `cut_after` make it misbehave.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STATS = {"policy": "dynamic", "requests": 3, "engine": {"model": "bard"}}
REASONS = {200: "OK", 302: "Found", 400: "Bad Request"}
Answer = tuple[int, Any]
CHAT = "/v1/chat/completions"
CHAT_TOKENS = 5  # of an answer that no max_tokens ends


class MockServer:
    """Remembers what it was asked; answers after `ttft` and a token every `itl` seconds."""

    def __init__(self) -> None:
        self.ttft = 0.0
        self.itl = 0.0
        self.together = 1  # tokens of a chunk
        self.queue_s = 0.0
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.sessions: list[tuple[str | None, ...]] = []  # and programs, of the headers
        self.running = self.most_running = 0
        self.most = 0  # nobody is answered before so many run
        self.holds: Callable[[dict[str, Any]], bool] = lambda body: False  # whether a request still has to wait
        self.stats: Answer = (200, STATS)
        self.info: Answer = (404, {"error": {"message": "no such path"}})
        self.models: Answer = (200, {"data": [{"id": "bard"}]})
        self.chats = True  # whether it has the route of chats
        self.step: dict[str, Any] = {}  # told on /events after each request, if there is one
        self._viewers: list[asyncio.StreamWriter] = []
        # What a whole answer is, or None for the dialect's own.
        self.answer: Callable[[dict[str, Any]], Answer | None] = lambda body: None
        # Chunks after which a stream stops without its end; the event that takes its place.
        self.cut_after: int | None = None
        self.last_words: dict[str, Any] | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mock", daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._request(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a client that left is no news
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in head[1:] if x)}
        if method == "GET":
            await self._look(path, writer)
            return
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        if path == CHAT and not (self.chats and body):
            reply(writer, 400 if self.chats else 404, {"error": {"message": "no messages, or no such path"}})
            return
        self.asked.append(body)
        self.paths.append(path)
        self.keys.append(headers.get("authorization"))
        self.sessions.append((headers.get("x-session-id"), headers.get("x-program-id")))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        while self.most_running < self.most or self.holds(body):
            await asyncio.sleep(0.01)
        try:
            await self._generate(path, body, writer)
        finally:
            self.running -= 1
            for viewer in self._viewers:
                viewer.write(b"id: 1\ndata: " + json.dumps(self.step).encode() + b"\n\n")

    async def _look(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/events" and self.step:
            writer.write(head_of(200, "text/event-stream"))
            self._viewers.append(writer)
            await self._over.wait()
        known: dict[str, Answer] = {"/stats": self.stats, "/info": self.info, "/v1/models": self.models}
        reply(writer, *known.get(path, (404, {"error": {"message": "no such path"}})))

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        count = body.get("num_tokens") or body.get("max_tokens")
        count = count or (CHAT_TOKENS if path == CHAT else body.get("parameters", {}).get("max_new_tokens", 1))
        own = self.answer(body)
        began = time.perf_counter()
        if path != "/generate_stream" and not body.get("stream"):
            await asyncio.sleep(self.ttft + self.itl * (count - 1))
            reply(writer, *(own or whole(path, body, count, self.queue_s)))
            return
        if own is not None:
            reply(writer, *own)
            return
        writer.write(head_of(200, "text/event-stream; charset=utf-8"))
        for sent, first in enumerate(range(0, count, self.together)):
            if sent == self.cut_after:
                if self.last_words is not None:
                    writer.write(b"data: " + json.dumps(self.last_words).encode() + b"\n\n")
                return
            last = min(first + self.together, count)
            # To a fixed schedule: delays must not add up what the loop is late.
            await asyncio.sleep(began + self.ttft + self.itl * first - time.perf_counter())
            writer.write(b": ping\n\n" + chunk(path, first, last, count, self.queue_s, body))
            await writer.drain()


def timings(queue_s: float) -> dict[str, Any]:
    return {"queue_s": queue_s, "batch_mean": 2.0, "batch_max": 3}


def usage(count: int, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return 7 prompt tokens for each message, of which those of earlier turns are cached."""
    prompt = 7 * len((body or {}).get("messages", "1"))
    cached = {"prompt_tokens_details": {"cached_tokens": prompt - 7}} if body else {}
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count, **cached}


def whole(path: str, body: dict[str, Any], count: int, queue_s: float) -> Answer:
    """Return a complete answer in the dialect of a path."""
    if path == "/generate":
        return 200, {"generated_text": " and so on"}
    if path == "/v1/completions":
        return 200, {"id": "cmpl-1", "choices": [{"text": " and so on"}], "usage": usage(count)}
    if path == CHAT:
        message = {"role": "assistant", "content": f"answer {len(body['messages'])}"}
        return 200, {"id": "c", "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage(count, body)}
    text = body["prompt"] + " [bold]and so on"
    return 200, {"completion": text, "num_tokens": count, "prompt_tokens": 7, "id": "a",
                 "finish_reason": "length", "timings": timings(queue_s)}  # fmt: skip


def chunk(path: str, first: int, last: int, count: int, queue_s: float, body: dict[str, Any]) -> bytes:
    """Return the event that brings tokens first..last of `count`."""
    end, text = last == count, " x" * (last - first)
    if path == "/generate_stream":
        details = {"finish_reason": "length", "generated_tokens": count, "input_length": 7}
        event: dict[str, Any] = {"index": last, "token": {"id": 1, "text": text}, "details": details if end else None}
        return b"data:" + json.dumps(event).encode() + b"\n\n"
    if path == "/v1/completions":
        event = {"id": "cmpl-1", "choices": [{"index": 0, "text": text}], "usage": usage(last)}
    elif path == CHAT:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if end else None}
        event = {"id": "c", "choices": [choice], "usage": usage(last, body)}
    else:
        final = {"id": "a", "num_tokens": count, "prompt_tokens": 7, "finish_reason": "length"}
        event = {"text": text} | (final | {"timings": timings(queue_s)} if end else {})
    ending = b"data: [DONE]\n\n" if end else b""
    return b"data: " + json.dumps(event).encode() + b"\n\n" + ending


def head_of(status: int, kind: str = "application/json", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Other')}", f"Content-Type: {kind}"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    lines += ["Connection: close", "x-prompt-tokens: 7", "x-generated-tokens: 20", "x-queue-time: 5"]
    return "\r\n".join([*lines, "", ""]).encode()


def reply(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    if status == 0:
        writer.transport.abort()
        return
    payload = content if isinstance(content, bytes) else json.dumps(content).encode()
    writer.write(head_of(status, length=len(payload)) + payload)


@contextmanager
def mock_server() -> Iterator[MockServer]:
    """Run a mock server for the length of a block."""
    server = MockServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()

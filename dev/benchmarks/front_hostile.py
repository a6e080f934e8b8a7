"""What hostile bodies, counts and upstreams cost the other clients of a queue: waits, gaps in a stream, and memory.

    python -m dev.benchmarks.front_hostile --json dev/benchmarks/results/front_hostile.json

One client streams, an event every 50 ms, and another asks for /health/live all the time. Meanwhile several clients send the
same hostile body at once, or ask an upstream that answers in one of several hostile ways. For each: the longest wait for
/health/live and the longest gap in the stream, in milliseconds, and how many MB the queue had more than before, at most and
two seconds later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import socket
import time
from argparse import Namespace
from concurrent.futures import Executor, Future, ProcessPoolExecutor

import aiohttp

from client.send.servers import free_port
from dev.benchmarks import report
from dev.benchmarks.front import Bench, resident

CHAT, SIZE, TEXT, CLIENTS = "/v1/chat/completions", 31 << 20, (8 << 20) - 100, 4
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
EVENT = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
COUNTS = '{"choices":[{"message":{"content":"a%s"}}],"usage":{"completion_tokens":%d,"prompt_tokens":%d}}'
BODIES = {
    "lists": b'{"x":[%s0]}' % (b"[]," * (SIZE // 3)), "numbers": b'{"prompt":[%s1]}' % (b"1," * (SIZE // 2)),
    "strings": b'{"prompt":[%s""]}' % (b'"",' * (SIZE // 3)), "text": b'{"prompt":"%s"}' % (b"ab, " * (SIZE // 4)),
    "deep": b'{"x":%s' % (b"[" * SIZE), "a picture": b'{"prompt":"%s"}' % (b"iVBORw0K" * (SIZE // 8)),
    "8 MB of escapes": b'{"prompt":"%s"}' % (b"\\n" * (TEXT // 2)), "8 MB of lists": b'{"x":[%s0]}' % (b"[]," * (TEXT // 3)),
    "8 MB of wide text": '{"prompt":"😀%s"}'.encode() % (b"ab, " * (TEXT // 4)),
    "130,000 numbers": b'{"prompt":[%s1]}' % (b"1," * 130_000),
}  # fmt: skip
EVENTS, WHOLE = HEAD % "text/event-stream", HEAD % "application/json"
ANSWERS = {
    "10,000,000 tokens": EVENTS + EVENT + "data: " + COUNTS % ("", 10**7, 10**8) + "\n\n",
    "30,000 tokens in one piece": WHOLE + COUNTS % (" token" * 30_000, 30_000, 5),
    "1,000,000 tokens in one piece": WHOLE + COUNTS % ("abcd" * 900_000, 10**6, 5),
    "4 MB of lists": WHOLE + "[" + "[]," * (1 << 20) + "0]", "500,000 events": EVENTS + EVENT * 500_000,
    "stream": EVENTS, "usual": WHOLE + COUNTS % ("", 2, 2), "60 MB without a line": EVENTS + "a" * (60 << 20), "500,000 heads": "HTTP/1.1 100 Continue\r\n\r\n" * 500_000,
}  # fmt: skip


def serve(port: int) -> None:
    """Answer as the field `model` says: with a hostile answer, with a stream of events, or with little."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
            model = json.loads(body).get("model", "") if len(body) < 1 << 16 else ""
            writer.write(answers.get(model, answers["stream" if model == "stream" else "usual"]))
            for _ in range(40 * (model == "stream")):
                writer.write(EVENT.encode())
                await asyncio.sleep(0.05)
            await writer.drain()
        writer.close()

    answers = {name: text.encode() for name, text in ANSWERS.items()}

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 26) as server:
            await server.serve_forever()

    asyncio.run(run())


def send(port: int, name: str) -> None:
    """Send one hostile body, or ask for one hostile answer, and read what comes."""
    body = BODIES.get(name) or json.dumps({"model": name, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", port)) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode())
        sock.sendall(b"Connection: close\r\n\r\n" + body)
        while sock.recv(1 << 16):
            pass


async def measure(bench: Bench, url: str, pid: int, attacks: list[Future[None]]) -> dict[str, float]:
    """Return what an attack costs the others."""
    worst, before, going = {"health_ms": 0.0, "gap_ms": 0.0, "most_mb": 0.0}, resident(pid), True

    def note(name: str, value: float) -> float:
        worst[name] = max(worst[name], value)
        return time.perf_counter()

    async def health() -> None:
        while going:
            began = time.perf_counter()
            await bench.call("GET", f"{url}/health/live")
            began = note("health_ms", 1e3 * (time.perf_counter() - began))
            note("most_mb", resident(pid) - before)
            await asyncio.sleep(0.01)

    async def stream() -> None:
        while going:
            async with bench.session.post(url + CHAT, json={"model": "stream", "stream": True}) as got:
                last = 0.0
                async for _ in got.content:
                    last = note("gap_ms", 1e3 * (time.perf_counter() - last) if last else 0.0)

    others = [asyncio.create_task(health()), asyncio.create_task(stream())]
    await asyncio.gather(*map(asyncio.wrap_future, attacks))
    await asyncio.sleep(2)
    going = False
    await asyncio.gather(*others)
    return {name: round(value, 1) for name, value in worst.items()} | {"left_mb": round(resident(pid) - before, 1)}


async def run(args: Namespace, pool: Executor) -> dict[str, dict[str, float]]:
    found = {}
    async with aiohttp.ClientSession() as session:
        bench = Bench(args, session)
        async with bench.queue("dynamic+vtc", 8) as (url, pid):
            for name in ["usual", *BODIES, *ANSWERS]:
                attacks = [pool.submit(send, int(url.rpartition(":")[2]), name) for _ in range(CLIENTS)]
                found[name] = await measure(bench, url, pid, attacks)
    return found


if __name__ == "__main__":
    args, spawn = report.parser("front_hostile", __doc__).parse_args(), multiprocessing.get_context("spawn")
    args.url = f"http://127.0.0.1:{(port := free_port())}"
    upstream = spawn.Process(target=serve, args=(port,), daemon=True)
    upstream.start()
    with ProcessPoolExecutor(CLIENTS, spawn) as pool:
        report.finish("front_hostile", asyncio.run(run(args, pool)), args.json)
    upstream.kill()

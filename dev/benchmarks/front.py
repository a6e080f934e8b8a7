"""The cost of `./eb queue`, and its predictions, before a scripted upstream or any server.

    python -m dev.benchmarks.front --json dev/benchmarks/results/front.json
    python -m dev.benchmarks.front throughput ttft waits --url http://127.0.0.1:8080 --slots 4

throughput: a burst through a queue with a slot more than the upstream, and without it, in turns. ttft: single requests, in
turns. waits: bursts under sjf, and what /what-if predicted of each from the same burst under dynamic just before; medians,
since equal bursts differ by up to a tenth. Order, shares and failures are in `tests/front`.

A server at --url must take `ignore_eos` in /v1/completions, as llama.cpp and vLLM do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from client.send.servers import free_port
from dev.benchmarks import report

ROOT, PATH = Path(__file__).parents[2], "/v1/completions"
PAUSE = 2.5  # seconds, after which /what-if takes requests for another load
PARTS = ("throughput", "ttft", "waits")


class Answer(NamedTuple):
    """When a client sent a request, got the first piece and had the whole answer, on one clock."""

    sent: float
    began: float
    ended: float
    wait: float  # seconds, as the queue says


def serve(port: int, slots: int, step: float) -> None:
    """Run a server whose slots each get a token at every multiple of `step` seconds."""
    free = asyncio.Semaphore(slots)

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        count, answer = asked["max_tokens"], web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        whole = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
        async with free:
            for _ in range(count):
                await asyncio.sleep(step - time.time() % step)
                await answer.prepare(request)
                await answer.write(b'data: {"choices": [{"text": " t"}]}\n\n')
        await answer.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(whole).encode())
        return answer

    app = web.Application()
    app.add_routes([web.post(PATH, complete)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True)


@contextlib.contextmanager
def scripted(slots: int, step: float) -> Iterator[str]:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, slots, step), daemon=True)
    process.start()
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with contextlib.suppress(aiohttp.ClientError):
            if await condition():
                return
        await asyncio.sleep(0.02)
    raise SystemExit(f"error: it did not happen within {seconds:g} s")


def resident(pid: int) -> float:
    """Return the MB that a process has in memory."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


class Bench(NamedTuple):
    """The parts, with the command line and the session of all clients."""

    args: Namespace
    session: aiohttp.ClientSession

    async def call(self, method: str, url: str, body: Any = None) -> Any:
        async with self.session.request(method, url, json=body) as answer:
            return await answer.json()

    @contextlib.asynccontextmanager
    async def queue(self, policy: str, slots: int) -> AsyncIterator[tuple[str, int]]:
        """Start a queue; yield its address and pid."""
        command = [sys.executable, "-m", "integrations.queue", policy, "--slots", str(slots), "--port", str(port := free_port()),
                   "--access-log", "off", "--upstream", self.args.url]  # fmt: skip
        process, url = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL), f"http://127.0.0.1:{port}"
        try:
            await until(lambda: self.call("GET", f"{url}/health/live"))
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60)

    async def ask(self, url: str, tokens: int) -> Answer:
        """Send a request; SystemExit if its answer is not whole."""
        body = {"model": self.args.model, "prompt": "hello", "max_tokens": tokens, "stream": True, "temperature": 0,
                "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
        began, data, sent = 0.0, b"", time.perf_counter()
        async with self.session.post(url + PATH, json=body) as got:
            async for piece in got.content.iter_any():
                began, data = began or time.perf_counter(), data + piece
        if not data.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"error: {url} answered {got.status}: {data[-200:].decode()}")
        return Answer(sent, began, time.perf_counter(), float(got.headers.get("X-Queue-Wait", 0)))

    async def burst(self, url: str, lengths: Sequence[int]) -> list[Answer]:
        return await asyncio.gather(*(self.ask(url, length) for length in lengths))

    async def throughput(self) -> dict[str, Any]:
        ratios, lengths = [], [random.Random(k).randint(20, 60) for k in range(self.args.burst)]
        async with self.queue("dynamic", self.args.slots + 1) as (url, _):
            for k in range(self.args.rounds + 1):
                took = {}
                for way in [url, self.args.url][:: 1 if k % 2 else -1]:
                    answers = await self.burst(way, lengths)
                    took[way] = max(a.ended for a in answers) - min(a.sent for a in answers)
                ratios.append(took[self.args.url] / took[url])
        return {"ratio": median(ratios[1:]), "ratios": ratios[1:]}  # the first warms up

    async def ttft(self) -> dict[str, Any]:
        pairs = []
        async with self.queue("dynamic", self.args.slots) as (url, _):
            for k in range(20 * self.args.rounds + 10):
                found = {way: await self.ask(way, 2) for way in [url, self.args.url][:: 1 if k % 2 else -1]}
                pairs.append([1e3 * (found[way].began - found[way].sent) for way in (self.args.url, url)])
        return {"added_ms": median(b - a for a, b in pairs[10:]), "alone_ms": median(a for a, _ in pairs[10:])}

    async def waits(self) -> dict[str, Any]:
        draw = random.Random(0)
        lengths, found = [draw.choice((4, 8, 16, 60)) for _ in range(self.args.burst)], list[dict[str, Any]]()
        async with self.queue("dynamic", self.args.slots) as (url, _):
            await self.burst(url, lengths)  # the law of its steps is learned
            for _ in range(self.args.rounds):
                found.append(await self._wait(url, lengths))
        waits = [one["wait_error"] for one in found if one["wait_error"] is not None]
        errors = {name: median(one[name] for one in found) for name in ("what_if_error", "error_of_dynamic")}
        return {**errors, "wait_error": median(waits) if waits else None, "rounds": found}

    async def _wait(self, url: str, lengths: Sequence[int]) -> dict[str, Any]:
        """Predict a burst under sjf from the same burst under dynamic, then measure it."""
        name = "dynamic+sjf"
        await self.call("PUT", f"{url}/policy", {"policy": "dynamic"})
        await self.ask(url, 1)  # what arrives before the first step under a policy is left out of its recording
        await asyncio.sleep(PAUSE)
        await self.burst(url, lengths)
        answer = await self.call("POST", f"{url}/what-if", {"policies": ["dynamic", name]})
        await self.call("PUT", f"{url}/policy", {"policy": name})
        real = await self.burst(url, lengths)
        (lane,) = (lane for lane in answer["lanes"] if lane["policy"] == name and not lane["measured"])
        arrived = [one["t"] for one in answer["requests"]]
        # Steps are kept for the first part of a long lane alone.
        waits = [step["t"] - arrived[int(k)] for step in lane["records"] for k in step["joined"] if k.isdigit()]
        wait, latency = fmean(a.wait for a in real), fmean(a.ended - a.sent for a in real)
        return {
            "what_if_error": lane["latency_mean_s"] / latency - 1, "error_of_dynamic": answer["error"]["latency_mean_s"],
            "sjf_s": latency, "sjf_wait_s": wait, "wait_error": fmean(waits) / wait - 1 if len(waits) == len(real) else None,
        }  # fmt: skip


async def run(args: Namespace) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        return {part: await getattr(Bench(args, session), part)() for part in args.parts}


def main() -> None:
    parser = report.parser("front", __doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--url", help="upstream (default: a scripted one)")
    parser.add_argument("--slots", type=int, default=4, help="of the upstream")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step of the scripted upstream")
    parser.add_argument("--model", default="default", help="named in each request")
    parser.add_argument(
        "--rounds", type=int, default=5, help="bursts of throughput and waits, and twenties of pairs of ttft"
    )
    parser.add_argument("--burst", type=int, default=48, help="requests of a burst")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        args.url = args.url or stack.enter_context(scripted(args.slots, args.step))
        report.finish("front", asyncio.run(run(args)), args.json)


if __name__ == "__main__":
    main()

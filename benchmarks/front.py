"""The cost of `./eb queue`, and whether it keeps its promises, before a scripted upstream or any server.

    python -m benchmarks.front --json benchmarks/results/front.json
    python -m benchmarks.front throughput ttft order shares waits --url http://127.0.0.1:8080 --slots 4

throughput: a burst through a queue with a slot more than the upstream, and without it, in turns. ttft: single requests, in
turns. order: whom each order lets through, one at a time. shares: tokens of two clients while both wait. waits: bursts
under sjf, and what /what-if predicted of each from the same burst under dynamic just before; medians, since equal bursts
differ by up to a tenth. mixed: some clients leave or read slowly, some requests fail, and one of two scripted upstreams
is killed and comes back; memory grows until the queue's records of steps and requests are full, after about 5,000
requests.

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
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from benchmarks import report
from client.send.servers import free_port

ROOT, PATH = Path(__file__).parents[1], "/v1/completions"
PAUSE = 2.5  # seconds, after which /what-if takes requests for another load
# max_tokens, priority, deadline in seconds and client: sent in this order while a longer request runs.
CASES = [(12, 5, 9, "a"), (3, 1, 8, "a"), (9, 3, 1, "a"), (6, 2, 7, "a"), (4, 4, 3, "b"), (7, 0, 5, "b"), (2, 9, 2, "c"), (20, 8, 4, "c")]  # fmt: skip
ORDERS = {"dynamic": "01234567", "nobatch": "01234567", "dynamic+drr": "01234567", "dynamic+sjf": "61435207",
          "dynamic+edf": "26475310", "dynamic+priority": "51324076", "dynamic+vtc": "04675123", "dynamic+rpm": "0124567"}  # fmt: skip
OPTIONS = {"dynamic+rpm": ["--policy-option", "limit=3"], "dynamic+vtc": ["--policy-option", "w_p=0"]}  # answers only
PARTS = ("throughput", "ttft", "order", "shares", "waits", "mixed")


class Answer(NamedTuple):
    """What a client got: `how` is whole, broken, left, another's, or the status of a refusal; times are on one clock."""

    how: str
    tokens: int = 0
    sent: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    wait: float = 0.0  # seconds, as the queue says

    def until(self, end: float) -> float:
        """Return the tokens that had arrived by `end`, if they arrived evenly."""
        return self.tokens * min(1.0, max(0.0, end - self.began) / (self.ended - self.began))


def serve(port: int, slots: int, step: float) -> None:
    """Run a server whose slots each get a token at every multiple of `step` seconds; /tags are what reached it."""
    free, tags = asyncio.Semaphore(slots), list[str]()

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        tags.append(asked.get("tag", ""))
        if asked.get("fails"):
            return web.json_response({"error": "boom"}, status=500)
        count, answer = asked["max_tokens"], web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        whole = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
        async with free:
            for _ in range(count):
                await asyncio.sleep(step - time.time() % step)
                if asked["stream"]:
                    await answer.prepare(request)
                    await answer.write(b'data: {"choices": [{"text": " t"}]}\n\n')
        if not asked["stream"]:
            return web.json_response(whole)
        await answer.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(whole).encode())
        return answer

    app = web.Application()
    app.add_routes([web.post(PATH, complete), web.get("/tags", lambda _: asyncio.sleep(0, web.json_response(tags)))])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True)


@contextlib.contextmanager
def scripted(slots: int, step: float, port: int = 0) -> Iterator[tuple[str, Any]]:
    port = port or free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, slots, step), daemon=True)
    process.start()
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}", process
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

    async def has(self, url: str, **counts: int) -> bool:
        """Return whether exactly this many requests are running or waiting."""
        stats = await self.call("GET", f"{url}/stats")
        return all(stats[f"requests-{name}"] == count for name, count in counts.items())

    @contextlib.asynccontextmanager
    async def queue(self, policy: str, slots: int, *urls: str) -> AsyncIterator[tuple[str, int]]:
        """Start a queue; yield its address and pid."""
        words = ["-m", "front", policy, "--slots", str(slots), "--port", str(port := free_port()), "--access-log", "off"]  # fmt: skip
        words += [word for url in urls or [self.args.url] for word in ("--upstream", url)]
        command = [sys.executable, *words, *OPTIONS.get(policy, [])]
        process, url = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL), f"http://127.0.0.1:{port}"
        try:
            await until(lambda: self.call("GET", f"{url}/health/live"))
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(60)

    async def ask(self, url: str, tokens: int, hints: Mapping[str, str] = {}, pause: float = 0, **more: Any) -> Answer:
        """Send a request, and pause between reads of the answer."""
        body = {"model": self.args.model, "prompt": "hello", "max_tokens": tokens, "stream": True, "temperature": 0,
                "ignore_eos": True, "stream_options": {"include_usage": True}, **more}  # fmt: skip
        id, began, data = uuid.uuid4().hex, 0.0, b""
        sent = time.perf_counter()
        try:
            async with self.session.post(url + PATH, json=body, headers={"X-Request-Id": id, **hints}) as got:
                async for piece in got.content.iter_any():
                    began, data = began or time.perf_counter(), data + piece
                    await asyncio.sleep(pause)
        except aiohttp.ClientError:
            return Answer("broken")
        how = "whole" if data.endswith(b"data: [DONE]\n\n" if body["stream"] else b"}") else "broken"
        how = how if got.status == 200 else str(got.status)
        how = how if got.headers.get("X-Request-Id", id) == id else "another's"
        return Answer(how, tokens, sent, began, time.perf_counter(), float(got.headers.get("X-Queue-Wait", 0)))

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

    async def order(self) -> dict[str, Any]:
        found = {}
        for policy, expected in ORDERS.items():
            async with self.queue(policy, 1) as (url, _):
                # Not so long that the guard of sjf lets those that have waited go first.
                asks = [asyncio.create_task(self.ask(url, 60, user="z"))]
                await until(lambda: self.has(url, running=1))
                for k, (tokens, priority, slo, user) in enumerate(CASES):
                    hints = {"X-Queue-Priority": str(priority), "X-Queue-Slo": str(slo)}
                    asks.append(asyncio.create_task(self.ask(url, tokens, hints, user=user)))
                    waiting = k + 1 - ("rpm" in policy and k >= 3)  # which refuses one
                    await until(lambda waiting=waiting: self.has(url, waiting=waiting))  # type: ignore[misc]
                answers = enumerate((await asyncio.gather(*asks))[1:])
                order = "".join(str(k) for k, a in sorted(answers, key=lambda pair: pair[1].began) if a.how == "whole")
                found[policy] = order if order == expected else f"{order}, not {expected}"
        return found

    async def shares(self) -> dict[str, Any]:
        draw, found = random.Random(0), {}
        asks = [("a", draw.randint(20, 30)) for _ in range(120)] + [("b", draw.randint(5, 12)) for _ in range(120)]
        draw.shuffle(asks)
        for policy in ("dynamic", "dynamic+vtc"):
            async with self.queue(policy, self.args.slots) as (url, _):
                first = [asyncio.create_task(self.ask(url, 100, user="z")) for _ in range(self.args.slots)]
                await until(lambda: self.has(url, running=self.args.slots))
                answers = await asyncio.gather(*(self.ask(url, tokens, user=user) for user, tokens in asks), *first)
            of = {user: [a for (one, _), a in zip(asks, answers) if one == user] for user in "ab"}
            end = min(max(a.began for a in some) for some in of.values())  # until then both wait
            found[policy] = {user: round(sum(a.until(end) for a in some)) for user, some in of.items()}
        return found

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

    async def mixed(self) -> dict[str, Any]:
        count, found, memory, room = self.args.requests, Counter[str](), {}, asyncio.Semaphore(64)

        async def one(url: str, i: int) -> None:
            kind, draw = i % 10, random.Random(i)
            more: dict[str, Any] = {"tag": f"r{i}", "user": "ab"[i % 2], "stream": i % 3 > 0, "fails": kind == 0}
            ask = self.ask(url, draw.randint(2, 30), pause=0.01 * (kind == 3), **more)
            async with room:
                try:
                    found[(await asyncio.wait_for(ask, draw.uniform(0.001, 0.2) if kind in (1, 2) else None)).how] += 1
                except asyncio.TimeoutError:
                    found["left"] += 1

        with contextlib.ExitStack() as stack:
            sites = [stack.enter_context(scripted(4, 0.002)) for _ in range(2)]
            (alive, _), (killed, process) = sites
            async with self.queue("dynamic+vtc", 4, alive, killed) as (url, pid):
                asks = asyncio.gather(*(one(url, i) for i in range(count)))
                await until(lambda: asyncio.sleep(0, found.total() >= count // 3))
                memory["third"], tags = resident(pid), await self.call("GET", f"{killed}/tags")
                process.kill()
                await asyncio.sleep(1.0)
                stack.enter_context(scripted(4, 0.002, int(killed.rpartition(":")[2])))
                await asks
                await until(lambda: self.has(url, running=0, waiting=0))
                memory["end"] = resident(pid)
                tags += [tag for site in (alive, killed) for tag in await self.call("GET", f"{site}/tags")]
        return {"answers": found, "sent_twice": sum(n > 1 for n in Counter(tags).values()), "memory_MB": memory}


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
    parser.add_argument("--requests", type=int, default=1000, help="of mixed")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        args.url = args.url or stack.enter_context(scripted(args.slots, args.step))[0]
        report.finish("front", asyncio.run(run(args)), args.json)


if __name__ == "__main__":
    main()

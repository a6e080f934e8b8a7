"""What the queue of `./eb fleet` costs, what failures of replicas do to requests, and whether texts stay the same.

    python -m dev.benchmarks.fleet cost failures texts --json dev/benchmarks/results/fleet.json

It needs Ray (`dev/tools/setup.sh ray`) and runs in a network namespace of its own, because Ray listens on all
interfaces; `--no-namespace` runs it in this one.

* cost: a mock model behind one replica; rounds directly at its server and through the ingress take turns.
* failures: requests at a steady rate while an actor is killed, then a server, and then all replicas are replaced. A client
  that does not retry is the first attempt of one that does.
* texts: sampled texts of `bard` and `smollm2` by two replicas in turn, and by one of their servers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp

from dev.benchmarks import report
from dev.benchmarks.closed_loop import cpu_seconds
from dev.benchmarks.fleet_process import ACTOR, SERVER, descendants, isolate, running

MOCK = ["dynamic", "--model", "mock:llm-mock@20"]
PAUSE, TRIES = 0.5, 40  # of a client that retries


async def ask(session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> str | None:
    """Return the text of an answer; None if it was refused, or its stream did not end as it should."""
    try:
        async with session.post(f"{url}/inference", json=fields) as answer:
            body = await answer.read()
    except aiohttp.ClientError:
        return None
    if answer.status != 200:
        return None
    if not fields.get("stream"):
        text: str = json.loads(body)["completion"]
        return text
    events = body.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        return None
    pieces = [json.loads(event[6:])["text"] for event in events[:-2] if event.startswith(b"data:")]
    return "".join([str(fields["prompt"]), *pieces])


async def paced(
    session: aiohttp.ClientSession, url: str, fields: dict[str, Any], rate: float, count: int
) -> list[float]:
    """Send requests at an even rate; return their latencies in ms."""
    began = time.perf_counter()

    async def one(k: int) -> float:
        await asyncio.sleep(began + k / rate - time.perf_counter())
        sent = time.perf_counter()
        if await ask(session, url, fields) is None:
            raise SystemExit("error: a request failed in a round without failures")
        return 1e3 * (time.perf_counter() - sent)

    return await asyncio.gather(*map(one, range(count)))


async def crowded(session: aiohttp.ClientSession, url: str, fields: dict[str, Any], users: int, count: int) -> float:
    """Let users send one request after the other; return the requests per second."""
    began = time.perf_counter()
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            await ask(session, url, fields)

    await asyncio.gather(*(one() for _ in range(users)))
    return count / (time.perf_counter() - began)


async def measure_cost(args: Any) -> dict[str, Any]:
    """Return latencies and throughput directly at a server and through the ingress, in rounds that take turns."""
    fields = {"prompt": "hello", "num_tokens": 4, "seed": 1}
    async with running(1, *MOCK) as (fleet, session, start_seconds):
        ways = {"direct": fleet.servers()[0], "ingress": fleet.url}
        single: dict[str, list[float]] = {way: [] for way in ways}
        loaded: dict[str, list[float]] = {way: [] for way in ways}
        kept: dict[str, list[float]] = {way: [] for way in ways}
        most: dict[str, list[float]] = {way: [] for way in ways}
        for k in range(args.rounds + 1):
            for way, url in ways.items():
                for _ in range(50):
                    single[way] += await paced(session, url, fields | {"num_tokens": 1}, 1e9, 1)
                began = time.perf_counter()
                loaded[way] += await paced(session, url, fields, args.rate, int(args.rate * args.seconds))
                kept[way].append(int(args.rate * args.seconds) / (time.perf_counter() - began))
                most[way].append(await crowded(session, url, fields, 64, 1000))
            for way in ways if k == 0 else ():  # the first round warms up
                for figures in (single, loaded, kept, most):
                    figures[way].clear()
        before = cpu_seconds(fleet.process.pid)
        await paced(session, fleet.url, fields, 1e9, 1000)
        per_request = 1e3 * (cpu_seconds(fleet.process.pid) - before) / 1000
        others = [
            pid for pid, command in descendants(fleet.process.pid) if SERVER not in command and "app.py" not in command
        ]
        before = sum(map(cpu_seconds, others))
        await asyncio.sleep(args.seconds)
        share = (sum(map(cpu_seconds, others)) - before) / args.seconds
        memory = sum(map(resident, [fleet.process.pid, *others])) >> 20
    return {
        "start_s": round(start_seconds, 1), "memory_of_ray_and_ingress_MiB": memory, "cores_taken_by_idle_ray": round(share, 3),
        "ingress_cpu_ms_per_request": round(per_request, 2),
        **{
            way: {
                "one_token_p50_ms": round(statistics.median(single[way]), 2),
                "p50_ms": round(statistics.median(loaded[way]), 2),
                "p99_ms": round(statistics.quantiles(loaded[way], n=100)[98], 2),
                "answered_per_s": round(statistics.median(kept[way]), 1),
                "most_requests_per_s": round(statistics.median(most[way])),
            }
            for way in ways
        },
    }  # fmt: skip


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has, of shared ones its part."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


async def measure_failures(args: Any) -> dict[str, Any]:
    """Return how many requests were answered at the first attempt and in the end, and what happened meanwhile."""
    async with running(2, *MOCK) as (fleet, session, _):
        bodies = [{"prompt": f"prompt {k}", "num_tokens": 20, "seed": k, "stream": k % 3 == 0} for k in range(12)]
        texts = [await ask(session, fleet.url, body) for body in bodies]
        first: list[bool] = []
        other_texts = unanswered = 0
        events: list[dict[str, Any]] = []
        over = asyncio.Event()

        async def one(k: int) -> None:
            nonlocal other_texts, unanswered
            body = bodies[k % len(bodies)]
            text = await ask(session, fleet.url, body)
            first.append(text is not None)
            for _ in range(TRIES):
                if text is not None:
                    break
                await asyncio.sleep(PAUSE)
                text = await ask(session, fleet.url, body)
            unanswered += text is None
            other_texts += text is not None and text != texts[k % len(bodies)]

        async def disturb() -> None:
            for name in (ACTOR, SERVER, "replace"):
                await asyncio.sleep(2.0)
                before = set(fleet.servers())
                began = time.perf_counter()
                if name == "replace":
                    fleet.process.send_signal(signal.SIGHUP)
                else:
                    os.kill(fleet.find(name)[0][0], signal.SIGKILL)
                while len(set(fleet.servers()) - before) < (2 if name == "replace" else 1):
                    await asyncio.sleep(0.2)
                await fleet.ready(session, 2)
                events.append({"event": name, "whole_again_s": round(time.perf_counter() - began, 1)})
            over.set()

        disturbing = asyncio.create_task(disturb())
        began, tasks = time.perf_counter(), list[asyncio.Task[None]]()
        while len(tasks) < args.requests or not over.is_set():
            tasks.append(asyncio.create_task(one(len(tasks))))
            await asyncio.sleep(began + len(tasks) / args.failure_rate - time.perf_counter())
            if disturbing.done():
                disturbing.result()
        await asyncio.gather(disturbing, *tasks)
    return {
        "requests": len(first), "rate": args.failure_rate, "events": events,
        "answered_without_retry": round(sum(first) / len(first), 4), "unanswered_without_retry": len(first) - sum(first),
        "answered_with_retry": round(1 - unanswered / len(first), 4), "other_texts": other_texts,
    }  # fmt: skip


async def measure_texts(args: Any) -> dict[str, Any]:
    """Return for each model how many sampled texts of two replicas in turn differ from those of one of their servers."""
    return {model: await compare_texts(model, args.texts) for model in args.model}


async def compare_texts(model: str, count: int) -> dict[str, Any]:
    """Return how many texts of a model differ, and how many requests each replica answered."""
    async with running(2, "dynamic", "--model", model, "--router", "round-robin") as (fleet, session, _):
        bodies = [
            {"prompt": f"ROMEO:\nLine {k}", "num_tokens": 40, "seed": k, "temperature": 1.0} for k in range(count)
        ]
        alone = [await ask(session, fleet.servers()[0], body) for body in bodies]
        together = await asyncio.gather(*(ask(session, fleet.url, body) for body in bodies))
        replicas = list((await fleet.stats(session)).values())
    differ = sum(a != b or a is None for a, b in zip(alone, together))
    served = [one["requests"] for one in replicas]  # one of them also the texts of one server
    return {"texts": count, "differ": differ, "requests_by_replica": served, "dtype": replicas[0]["engine"]["dtype"]}


def main() -> None:
    parser = report.parser("fleet", __doc__)
    parser.add_argument("parts", nargs="*", default=["cost", "failures", "texts"], help="cost, failures, texts")
    parser.add_argument("--rounds", type=int, default=3, help="of each way in cost")
    parser.add_argument("--rate", type=float, default=200, help="requests per second in cost")
    parser.add_argument("--seconds", type=float, default=10, help="of a round of cost")
    parser.add_argument("--requests", type=int, default=1000, help="of failures")
    parser.add_argument("--failure-rate", type=float, default=20, help="requests per second in failures")
    parser.add_argument("--texts", type=int, default=64, help="of texts")
    parser.add_argument("--model", nargs="*", default=["bard", "smollm2"], help="of texts (default: bard smollm2)")
    parser.add_argument("--no-namespace", action="store_true", help="run in this network namespace")
    args = parser.parse_args()
    if not args.no_namespace:
        isolate()
    measures = {"cost": measure_cost, "failures": measure_failures, "texts": measure_texts}
    if unknown := set(args.parts) - set(measures):
        parser.error(f"unknown part {', '.join(unknown)}. Use {', '.join(measures)}")
    report.finish("fleet", {part: asyncio.run(measures[part](args)) for part in args.parts}, args.json)


if __name__ == "__main__":
    main()

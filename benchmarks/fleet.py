"""What the ingress of `./eb fleet` costs, what failures of replicas do to requests, and whether texts stay the same.

    python -m benchmarks.fleet cost failures texts --json benchmarks/results/fleet.json

It needs Ray (`tools/setup.sh requirements-ray.txt`) and runs in a network namespace of its own, because Ray listens on all
interfaces; `--no-namespace` runs it in this one.

* cost: a mock model behind one replica; rounds directly at its server and through the ingress take turns.
* failures: requests at a steady rate while an actor is killed, then a server, and then all replicas are replaced. A client
  that does not retry is the first attempt of one that does.
* texts: sampled texts of the model `bard` by two replicas, and by one of their servers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import report
from client.send.servers import free_port

ISOLATED = "EB_INTERNAL_ISOLATED"
MOCK = ["dynamic", "--model", "mock:llm-mock@20"]
ACTOR, SERVER = "ray::ServeReplica", "gunicorn"
PAUSE, TRIES = 0.5, 40  # of a client that retries


def isolate() -> None:
    """Run this command again in a network namespace of its own, and there bring up the loopback interface."""
    if os.environ.get(ISOLATED) is None:
        command = [sys.executable, "-m", "benchmarks.fleet", *sys.argv[1:]]
        os.execvpe(
            "unshare", ["unshare", "--user", "--map-root-user", "--net", *command], {**os.environ, ISOLATED: "1"}
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 1 | 64))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes that a process has started, at any depth, with their command lines."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child, Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                yield from descendants(child)


class Fleet:
    """`python -m fleet.serve` on a free port."""

    def __init__(self, *arguments: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleet.serve", *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stderr=sys.stderr,
        )
        self.began = began

    def find(self, name: str) -> list[tuple[int, str]]:
        """Return the processes of replicas whose command line has this text, the oldest first."""
        actors = [found for found in descendants(self.process.pid) if ACTOR in found[1]]
        if name == ACTOR:
            return sorted(actors)
        return sorted(found for pid, _ in actors for found in descendants(pid) if name in found[1])

    def servers(self) -> list[str]:
        """Return the addresses of the replicas' own servers."""
        commands = {command for _, command in self.find("app.py --host")}
        return [f"http://127.0.0.1:{command.split('--port ')[1].split()[0]}" for command in sorted(commands)]

    async def ready(self, session: aiohttp.ClientSession, replicas: int, seconds: float = 180.0) -> float:
        """Wait until all replicas are ready; return the seconds since this object was made."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, ValueError):
                async with session.get(f"{self.url}/ready") as answer:
                    body = await answer.json()
                    if answer.status == 200 and body["status"] == "ok" and len(body["replicas"]) == replicas:
                        return time.perf_counter() - self.began
            await asyncio.sleep(0.2)
        raise SystemExit(f"error: the fleet ended, or was not ready after {seconds:g} s. See above")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


@contextlib.asynccontextmanager
async def running(replicas: int, *arguments: str) -> AsyncIterator[tuple[Fleet, aiohttp.ClientSession, float]]:
    """Start a fleet; yield it with a session, and the seconds that its start took."""
    fleet = Fleet(*arguments, "--replicas", str(replicas))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        try:
            yield fleet, session, await fleet.ready(session, replicas)
        finally:
            fleet.stop()


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


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has taken."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


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
    """Return how many sampled texts of two replicas differ from those of one of their servers."""
    async with running(2, "dynamic", "--model", args.model) as (fleet, session, _):
        bodies = [
            {"prompt": f"ROMEO:\nLine {k}", "num_tokens": 40, "seed": k, "temperature": 1.0} for k in range(args.texts)
        ]
        alone = [await ask(session, fleet.servers()[0], body) for body in bodies]
        together = await asyncio.gather(*(ask(session, fleet.url, body) for body in bodies))
        async with session.get(f"{fleet.url}/stats") as answer:
            stats = await answer.json()
    served = [one["requests"] for one in stats["replicas"].values()]
    differ = sum(a != b or a is None for a, b in zip(alone, together))
    return {"model": args.model, "texts": len(bodies), "differ": differ, "requests_by_replica": served}


def main() -> None:
    parser = report.parser("fleet", __doc__)
    parser.add_argument("parts", nargs="*", default=["cost", "failures", "texts"], help="cost, failures, texts")
    parser.add_argument("--rounds", type=int, default=3, help="of each way in cost (default %(default)s)")
    parser.add_argument("--rate", type=float, default=200, help="requests per second in cost (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="of a round of cost (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, help="of failures (default %(default)s)")
    parser.add_argument(
        "--failure-rate", type=float, default=20, help="requests per second in failures (default %(default)s)"
    )
    parser.add_argument("--texts", type=int, default=64, help="of texts (default %(default)s)")
    parser.add_argument("--model", default="bard", help="of texts (default %(default)s)")
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

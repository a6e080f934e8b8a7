"""What requests cost at the server's door, besides the tokens they ask for.

    python -m dev.benchmarks.door --model bard --json dev/benchmarks/results/door.json

Short requests: requests a second and processor time each, by 1 and by 64 connections.
Refusals: what 320 clients are served that just fit, and what is left of it when there are 512, all of which send again
as soon as they are answered or refused.
A full server: the time to the first byte of /health while 64 requests run and 256 wait, and the time until slots, pages
and queue are empty when all hang up at once.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from typing import Any

from dev.benchmarks import closed_loop, report
from dev.benchmarks.server import call, served, until

RUNNING, WAITING = 64, 256
SHORT, LONG, ENDLESS = (
    closed_loop.request("/inference", json.dumps({"prompt": "ROMEO:", "num_tokens": tokens}).encode())
    for tokens in (1, 32, 1000)
)


def first_byte(port: int, request: bytes) -> float:
    """Return the seconds from connecting to the first byte of the answer."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(request)
        connection.recv(16)
        took = time.perf_counter() - began
        while connection.recv(65536):
            pass
    return took


def ask(port: int) -> str:
    asked = {"prompt": "ROMEO:", "num_tokens": 16, "temperature": 0}
    return str(call(port, "POST", "/inference", asked)["completion"])


def fill(port: int) -> list[socket.socket]:
    """Send as many long requests as run and wait at once; return their connections."""
    connections = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(RUNNING + WAITING)]
    for connection in connections:
        connection.sendall(ENDLESS)
    return connections


def is_empty(port: int) -> bool:
    stats = call(port, "GET", "/stats")
    return not (stats["requests-running"] or stats["requests-waiting"] or stats["engine"]["kv"]["pages_used"])


def measure(port: int, times: int) -> dict[str, Any]:
    before = ask(port)
    connections = fill(port)
    until(lambda: call(port, "GET", "/stats")["requests-waiting"] >= WAITING - 8, 60)
    request = closed_loop.request("/health", headers="Connection: close\r\n")
    taken = sorted(first_byte(port, request) for _ in range(times))
    stats = call(port, "GET", "/stats")
    for connection in connections:
        connection.close()
    emptied = until(lambda: is_empty(port), 60)
    return {
        "running": stats["requests-running"], "waiting": stats["requests-waiting"],
        "health_p50_ms": 1e3 * taken[times // 2], "health_p99_ms": 1e3 * taken[times * 99 // 100],
        "health_max_ms": 1e3 * taken[-1], "emptied_s": emptied, "same_answer": ask(port) == before,
    }  # fmt: skip


def short_requests(port: int, pid: int, seconds: float) -> dict[str, Any]:
    """Return requests a second and milliseconds of processor time each, by number of connections."""
    result = {}
    closed_loop.run(port, 64, SHORT, 1.0)  # warm
    for clients in (1, 64):
        before = closed_loop.processor_seconds(pid)
        load = closed_loop.run(port, clients, SHORT, seconds)
        spent = closed_loop.processor_seconds(pid) - before
        n = load.statuses[200]
        result[f"{clients}"] = {
            "per_second": n / load.seconds, "server_ms": 1e3 * spent / n, "client_ms": 1e3 * load.client_cpu / n,
            "p50_ms": load.percentile_ms(50), "p99_ms": load.percentile_ms(99),
        }  # fmt: skip
    return result


def goodput(port: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return what clients that fit are served a second, and what more of them than fit are, in turn."""
    answered: dict[int, list[float]] = {RUNNING + WAITING: [], 512: []}
    refused = []
    for _ in range(rounds):
        for clients, rates in answered.items():
            load = closed_loop.run(port, clients, LONG, seconds)
            rates.append(load.statuses[200] / load.seconds)
            until(lambda: is_empty(port), 60)
        refused.append(load.statuses[429] / load.seconds)
    fits, more = (statistics.median(rates) for rates in answered.values())
    return {
        "fits_per_second": fits, "more_per_second": more, "refused_per_second": statistics.median(refused),
        "ratio": statistics.median(b / a for a, b in zip(*answered.values())),
    }  # fmt: skip


def refusal_ms(port: int, pid: int, seconds: float) -> float:
    """Return the processor time of one refusal, by a full server that only waits: its model sleeps."""
    endless = closed_loop.Client(port, ENDLESS)
    endless.send()
    until(lambda: call(port, "GET", "/stats")["requests-running"], 20)
    spent = []
    for clients in (0, 64):
        before = closed_loop.processor_seconds(pid)
        load = closed_loop.run(port, clients, SHORT, seconds)
        spent.append(closed_loop.processor_seconds(pid) - before)
    return 1e3 * (spent[1] - spent[0]) / load.statuses[429]


def say(text: str) -> None:
    print(text, file=sys.stderr)


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    say("short requests (1 token each)")
    for clients, load in result["short_requests"].items():
        say(
            f"  {clients:>3} connections  {load['per_second']:6.0f}/s  {load['server_ms']:.2f} ms of processor each  "
            f"p50 {load['p50_ms']:.1f} ms  p99 {load['p99_ms']:.1f} ms"
        )
    o = result["overload"]
    say(
        f"\noverload: {o['fits_per_second']:.0f}/s answered with {RUNNING + WAITING} clients, "
        f"{o['more_per_second']:.0f}/s with 512 (ratio {o['ratio']:.2f});\n  "
        f"{o['refused_per_second']:.0f}/s refused, {o['refusal_ms']:.2f} ms of processor each"
    )
    f = result["full"]
    say(
        f"\nfull server ({f['running']} running, {f['waiting']} waiting): /health p50 {f['health_p50_ms']:.1f} ms, "
        f"p99 {f['health_p99_ms']:.1f} ms;\n  empty {f['emptied_s']:.2f} s after all clients hang up"
    )


def main() -> None:
    parser = report.parser("door", __doc__)
    report.add_server(parser)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="of 320 and 512 clients in turn")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with served(args) as (port, pid):
        result["short_requests"] = short_requests(port, pid, args.seconds)
    with served(args, "--max-queue", str(WAITING)) as (port, _):
        result["overload"] = goodput(port, args.seconds, args.rounds)
    sleeping = argparse.Namespace(**{**vars(args), "model": "mock:llm-mock"})
    with served(sleeping, "--max-queue", "0", "--max-batch-size", "1") as (port, pid):
        result["overload"]["refusal_ms"] = refusal_ms(port, pid, args.seconds)
    with served(args, "--max-queue", str(WAITING)) as (port, _):
        result["full"] = measure(port, args.times)
    show(result)
    report.finish("door", result, args.json)


if __name__ == "__main__":
    main()

"""What those who watch cost the engine: the p99 time of an iteration with 16 viewers, half of them frozen, and without.

    python -m benchmarks.viewers --model bard --rounds 6 --json benchmarks/results/viewers.json

Rounds with and without viewers take turns (A B, B A, ...) on one server, under the same batch of long requests. Viewers
ask for what the live page asks for. An iteration is timed from its beginning to that of the next, so that what viewers
cost between two steps counts too; the server's own records tell, read when the round is over. Each pair gives one ratio,
and the median of them is the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import statistics
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.server import call, served, until

VIEWERS, FROZEN = 16, 8
ASK = b"GET /events?detail=1&compact=1 HTTP/1.1\r\nHost: x\r\n\r\n"
BOUND = 1.05


def viewers_of(port: int) -> int:
    """Return how many watch, as the server counts them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        for line in reply:
            if line.startswith(b"eb_event_viewers "):
                return int(float(line.split()[1]))
    raise SystemExit("error: /metrics does not count viewers. Use this benchmark's own version of the server")


@contextlib.contextmanager
def watching(port: int, count: int) -> Iterator[None]:
    """Keep this many viewers connected: every second one reads, the others have stopped reading."""
    until(lambda: viewers_of(port) == 0, 30)  # who read the last round's steps has its place until it is noticed
    sockets = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(count)]
    over = threading.Event()
    reader = threading.Thread(target=read_all, args=(sockets[::2], over), daemon=True)
    try:
        for number, sock in enumerate(sockets):
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(ASK)
        reader.start()
        until(lambda: viewers_of(port) == count, 30)
        yield
    finally:
        over.set()
        for sock in sockets:
            sock.close()
        until(lambda: viewers_of(port) == 0, 60)


def read_all(sockets: list[socket.socket], over: threading.Event) -> None:
    """Read whatever comes, and throw it away, at the lowest priority: real viewers compute on other machines."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        while not over.is_set():
            for key, _ in selector.select(0.2):
                with contextlib.suppress(OSError):
                    if not key.fileobj.recv(1 << 18):  # type: ignore[union-attr]
                        selector.unregister(key.fileobj)


def compute(port: int, running: int, tokens: int) -> None:
    """Let the server compute one batch of equal requests."""
    body = {"prompt": "ROMEO:", "num_tokens": tokens}
    with ThreadPoolExecutor(running) as pool:
        list(pool.map(lambda _: call(port, "POST", "/inference", body), range(running)))


def turns(port: int, running: int, last: int) -> list[float]:
    """Return the seconds from the beginning of each of the last steps to that of the next, where all ran in both."""
    steps: list[dict[str, Any]] = []
    url = f"http://127.0.0.1:{port}/events?last={last}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        while len(steps) < last:
            line = reply.readline()
            if line.startswith(b"data: "):
                steps.append(json.loads(line[6:]))
    full = [step for step in steps if len(step["members"]) == running]
    return [b["t"] - a["t"] for a, b in pairwise(full) if b["n"] == a["n"] + 1]


def round_of(port: int, args: argparse.Namespace, viewers: int) -> dict[str, float]:
    """Compute one round and return its percentiles in ms."""
    with watching(port, viewers) if viewers else contextlib.nullcontext():
        compute(port, args.running, args.tokens)
    taken = turns(port, args.running, args.tokens)
    if len(taken) < args.tokens // 2:
        raise SystemExit(f"error: only {len(taken)} of {args.tokens} steps had all requests. Raise --tokens")
    return {**report.percentiles(taken), "steps": len(taken)}


def measure(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return all rounds in pairs, and the median of their ratios."""
    round_of(port, args, 0)  # warms up
    pairs = []
    for number in range(args.rounds):
        order = (0, VIEWERS) if number % 2 == 0 else (VIEWERS, 0)
        found = {viewers: round_of(port, args, viewers) for viewers in order}
        pairs.append({"without": found[0], "with": found[VIEWERS]})
    ratios = {
        rank: sorted(pair["with"][rank] / pair["without"][rank] for pair in pairs) for rank in ("p50_ms", "p99_ms")
    }
    return {
        "benchmark": "viewers", "viewers": VIEWERS, "frozen": FROZEN, "running": args.running, "pairs": pairs,
        "p50_ratio": statistics.median(ratios["p50_ms"]), "p99_ratio": statistics.median(ratios["p99_ms"]),
        "p99_ratios": ratios["p99_ms"], "bound": BOUND,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    rows = []
    for number, pair in enumerate(result["pairs"], 1):
        alone, watched = pair["without"], pair["with"]
        figures = (alone["p50_ms"], watched["p50_ms"], alone["p99_ms"], watched["p99_ms"])
        ratio = watched["p99_ms"] / alone["p99_ms"]
        rows.append([str(number), *(f"{ms:.2f}" for ms in figures), f"{ratio:.3f}"])
    heads = ("pair", "p50 alone", "p50 watched", "p99 alone", "p99 watched", "p99 ratio")
    report.show(f"an iteration of {result['running']} requests, ms", heads, rows, left=0)
    met = "met" if result["p99_ratio"] < BOUND else "not met"
    Console(stderr=True).print(f"median p99 ratio {result['p99_ratio']:.3f}; wanted below {BOUND}: {met}")


def main() -> None:
    parser = report.parser("viewers", __doc__)
    report.add_server(parser)
    parser.add_argument("--running", type=int, default=16, help="requests in the batch (16)")
    parser.add_argument("--tokens", type=int, default=900, help="of each: steps of a round (900)")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of rounds (6)")
    args = parser.parse_args()
    with served(args, "--access-log", "off") as server:
        result = measure(server.port, args)
    show(result)
    report.finish("viewers", {"model": args.model, **result}, args.json)


if __name__ == "__main__":
    main()

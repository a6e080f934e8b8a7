"""What a batch costs the requests beside it: their p99 latency while `/v1/batches` computes lines, and without.

    python -m benchmarks.beside --model bard --rounds 2 --json benchmarks/results/beside.json

Rounds with and without a batch take turns (A B, B A, ...) on one server, under the same Poisson arrivals. The batch is longer
than a round, and is cancelled at its end. The latencies of all rounds of a kind are pooled for the percentiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.door import served, until

BOUND = 1.05
ENDED = ("completed", "failed", "expired", "cancelled")
BOUNDARY = "benchmark"


def call(
    port: int, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> dict[str, Any]:
    """Return the JSON answer to a request."""
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def upload(port: int, lines: int, tokens: int) -> str:
    """Upload the lines of a batch; return the id of the file."""
    fields = (
        {"prompt": f"Scene {i}. The king speaks:", "max_tokens": tokens, "ignore_eos": True} for i in range(lines)
    )
    rows = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
        for i, body in enumerate(fields)
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    form = (head + "\n".join(rows) + f"\n\r\n--{BOUNDARY}--\r\n").encode()
    return str(call(port, "POST", "/v1/files", form, f"multipart/form-data; boundary={BOUNDARY}")["id"])


@contextlib.contextmanager
def batch_beside(port: int, file: str, done: list[int]) -> Iterator[None]:
    """Compute a batch meanwhile; append the number of its lines that were computed."""
    fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    id = call(port, "POST", "/v1/batches", json.dumps(fields).encode())["id"]

    def state() -> dict[str, Any]:
        return call(port, "GET", f"/v1/batches/{id}")

    until(lambda: state()["request_counts"]["completed"] > 0, 60)
    yield
    if state()["status"] != "in_progress":
        raise SystemExit("error: the batch ended before the round. Raise --lines")
    call(port, "POST", f"/v1/batches/{id}/cancel", b"")
    until(lambda: state()["status"] in ENDED, 60)
    done.append(state()["request_counts"]["completed"])


def latencies(port: int, args: argparse.Namespace) -> list[float]:
    """Send a round of requests at their times; return the seconds from each one's time to its whole answer."""
    rng = random.Random(args.seed)
    found: list[float] = []
    threads = []
    began = time.perf_counter() + 0.1
    at = began
    for number in range(args.requests):
        at += rng.expovariate(args.rate)
        body = {"prompt": f"Enter the ghost of {number}", "num_tokens": rng.randint(16, 64), "seed": number}
        threads.append(threading.Thread(target=_ask, args=(port, at, json.dumps(body).encode(), found)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _ask(port: int, at: float, body: bytes, found: list[float]) -> None:
    time.sleep(max(0.0, at - time.perf_counter()))
    call(port, "POST", "/inference", body)
    found.append(time.perf_counter() - at)


def percentiles(values: list[float]) -> dict[str, float]:
    ranks = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": 1e3 * ranks[49], "p90_ms": 1e3 * ranks[89], "p99_ms": 1e3 * ranks[98], "requests": len(values)}


def measure(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the percentiles of both kinds of rounds, and their ratios."""
    file = upload(port, args.lines, args.tokens)
    latencies(port, args)  # warms up
    pooled: dict[str, list[float]] = {"alone": [], "beside": []}
    lines: list[int] = []
    for number in range(args.rounds):
        for kind in ("alone", "beside") if number % 2 == 0 else ("beside", "alone"):
            with batch_beside(port, file, lines) if kind == "beside" else contextlib.nullcontext():
                pooled[kind] += latencies(port, args)
    alone, beside = (percentiles(pooled[kind]) for kind in ("alone", "beside"))
    ratios = {f"{rank}_ratio": beside[f"{rank}_ms"] / alone[f"{rank}_ms"] for rank in ("p50", "p90", "p99")}
    return {"alone": alone, "beside": beside, "lines": lines, "rate": args.rate, "bound": BOUND, **ratios}


def show(result: dict[str, Any]) -> None:
    table = Table(title="latency of requests, ms")
    for name in ("", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for kind in ("alone", "beside"):
        table.add_row(kind, *(f"{result[kind][f'{rank}_ms']:.1f}" for rank in ("p50", "p90", "p99")))
    table.add_row("ratio", *(f"{result[f'{rank}_ratio']:.3f}" for rank in ("p50", "p90", "p99")))
    console = Console(stderr=True)
    console.print(table)
    met = "met" if result["p99_ratio"] <= BOUND else "not met"
    console.print(f"lines computed in each round: {result['lines']}; wanted a p99 ratio of at most {BOUND}: {met}")


def main() -> None:
    parser = report.parser("beside", __doc__)
    report.add_server(parser)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second (4)")
    parser.add_argument("--requests", type=int, default=200, help="of a round (200)")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of rounds (2)")
    parser.add_argument("--lines", type=int, default=20_000, help="of the batch (20,000)")
    parser.add_argument("--tokens", type=int, default=64, help="of each line (64)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(args, "--access-log", "off", "--batch-folder", folder) as server,
    ):
        result = measure(server.port, args)
    show(result)
    report.finish("beside", {"model": args.model, **result}, args.json)


if __name__ == "__main__":
    main()

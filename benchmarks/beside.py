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
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.server import call, served, until

BOUND = 1.05
ENDED = ("completed", "failed", "expired", "cancelled")


def upload(port: int, lines: int, tokens: int) -> str:
    """Upload the lines of a batch; return the id of the file."""
    fields = (
        {"prompt": f"Scene {i}. The king speaks:", "max_tokens": tokens, "ignore_eos": True} for i in range(lines)
    )
    rows = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
        for i, body in enumerate(fields)
    ]
    files = {"file": ("lines.jsonl", "\n".join(rows))}
    return str(call(port, "POST", "/v1/files", data={"purpose": "batch"}, files=files)["id"])


@contextlib.contextmanager
def batch_beside(port: int, file: str, done: list[int]) -> Iterator[None]:
    """Compute a batch meanwhile; append the number of its lines that were computed."""
    fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    id = call(port, "POST", "/v1/batches", fields)["id"]

    def state() -> Any:
        return call(port, "GET", f"/v1/batches/{id}")

    until(lambda: state()["request_counts"]["completed"] > 0, 60)
    yield
    if state()["status"] != "in_progress":
        raise SystemExit("error: the batch ended before the round. Raise --lines")
    call(port, "POST", f"/v1/batches/{id}/cancel")
    until(lambda: state()["status"] in ENDED, 60)
    done.append(state()["request_counts"]["completed"])


def latencies(port: int, args: argparse.Namespace) -> list[float]:
    """Send a round of requests at their times; return the seconds from each one's time to its whole answer."""
    rng = random.Random(args.seed)
    at = time.perf_counter() + 0.1

    def ask(at: float, body: dict[str, Any]) -> float:
        time.sleep(max(0.0, at - time.perf_counter()))
        call(port, "POST", "/inference", body)
        return time.perf_counter() - at

    with ThreadPoolExecutor(args.requests) as pool:
        answers = []
        for number in range(args.requests):
            at += rng.expovariate(args.rate)
            body = {"prompt": f"Enter the ghost of {number}", "num_tokens": rng.randint(16, 64), "seed": number}
            answers.append(pool.submit(ask, at, body))
    return [answer.result() for answer in answers]


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
    alone, beside = ({**report.percentiles(own), "requests": len(own)} for own in pooled.values())
    ratios = {f"{rank}_ratio": beside[f"{rank}_ms"] / alone[f"{rank}_ms"] for rank in ("p50", "p90", "p99")}
    return {"alone": alone, "beside": beside, "lines": lines, "rate": args.rate, "bound": BOUND, **ratios}


def show(result: dict[str, Any]) -> None:
    ranks = ("p50", "p90", "p99")
    rows = [[kind, *(f"{result[kind][f'{rank}_ms']:.1f}" for rank in ranks)] for kind in ("alone", "beside")]
    rows.append(["ratio", *(f"{result[f'{rank}_ratio']:.3f}" for rank in ranks)])
    report.show("latency of requests, ms", ("", *ranks), rows)
    met = "met" if result["p99_ratio"] <= BOUND else "not met"
    Console(stderr=True).print(
        f"lines computed in each round: {result['lines']}; wanted a p99 ratio of at most {BOUND}: {met}"
    )


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

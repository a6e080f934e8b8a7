"""What a token costs the process that computes, and a request its front ends, at the pace of an H100.

    python -m dev.benchmarks.front_ends --json dev/benchmarks/results/front_ends.json

A mock model sleeps as long as the steps of gpt2-medium took there (h100.json, fitted to results/gpu.json). Clients send their
next request as soon as the last is answered; servers with and without front ends take turns. On two cores, one of which the
clients share, it says what each process costs, not what a machine with more of them delivers.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from dev.benchmarks import closed_loop, report
from dev.benchmarks.server import started

LAW = Path(__file__).with_name("h100.json")
TOKENS = 100


def measure(port: int, master: int, clients: int, seconds: float, stream: bool) -> dict[str, float]:
    """Return tokens a second, and the processor time in microseconds of the engine for a token, of front ends for a request."""
    body = {"prompt": "The king speaks to the people of the city", "num_tokens": TOKENS, "stream": stream}
    message = closed_loop.request("/inference", json.dumps(body).encode())
    closed_loop.run(port, clients, message, 1.0)  # warm
    engine, *front_ends = map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split())
    before = [closed_loop.cpu_seconds(pid) for pid in (engine, *front_ends)]
    load = closed_loop.run(port, clients, message, seconds)
    spent = [closed_loop.cpu_seconds(pid) - s for pid, s in zip((engine, *front_ends), before)]
    n = load.statuses[200]
    if load.statuses.total() != n:
        raise SystemExit(f"some requests failed: {dict(load.statuses)}")
    return {
        "tokens_s": n * TOKENS / load.seconds, "engine_us_token": 1e6 * spent[0] / n / TOKENS,
        "front_end_us_request": 1e6 * sum(spent[1:]) / n, "client_us_request": 1e6 * load.client_cpu / n,
    }  # fmt: skip


def main() -> None:
    parser = report.parser("front_ends", __doc__)
    parser.add_argument("--front-ends", type=int, nargs="+", default=[0, 1], help="numbers of front ends")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for count in args.front_ends:
            own = f"--model=mock:{LAW}", f"--max-batch-size={args.clients}", "--access-log=off", f"--front-ends={count}"
            with started("dynamic", *own) as (port, master):
                for stream in (False, True):
                    row = measure(port, master, args.clients, args.seconds, stream)
                    rows.setdefault(f"{count} front ends, {'streams' if stream else 'whole'}", []).append(row)
    result: dict[str, Any] = {
        name: {key: statistics.median(row[key] for row in each) for key in each[0]} for name, each in rows.items()
    }
    shown = ([name, *(f"{value:,.1f}" for value in row.values())] for name, row in result.items())
    report.show(None, ["", *next(iter(result.values()))], shown)
    report.finish("front_ends", result, args.json)


if __name__ == "__main__":
    main()

"""Test `/requests/{id}/blame`: does a request wait as much less without its worst culprit as the server predicts?

    python -m benchmarks.blame --model mock:llm-mock@2 --json benchmarks/results/blame.json

For each policy, a load is sent once, and the server is asked who delayed the requests that waited longest. Then the load is
sent again for each of them, without the request that it names first. `error` is the measured gain in waiting minus the
predicted one, as a share of the whole wait; `residual` is that of the answer, and `off` the error of the simulated latency.
"""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import report
from benchmarks.server import call, served


def send(port: int, name: str, tokens: dict[int, int], gap: float) -> dict[int, Any]:
    """Send a request every `gap` seconds, of these tokens by place; return the server's records of them."""
    began = time.perf_counter() + 0.1

    def ask(place: int) -> None:
        time.sleep(max(0.0, began + place * gap - time.perf_counter()))
        body = {"prompt": "hi", "num_tokens": tokens[place]}
        call(port, "POST", "/inference", body, headers={"X-Request-Id": f"{name}-{place}"})

    with ThreadPoolExecutor(len(tokens)) as pool:
        list(pool.map(ask, tokens))
    return {place: call(port, "GET", f"/requests/{name}-{place}") for place in tokens}


def waited(record: Any) -> float:
    return 1000 * float(record["scheduled_at"] - record["arrived_at"])


def measure(port: int, args: Any) -> list[dict[str, Any]]:
    """Return, for the requests that waited the longest, what was said and what was measured."""
    draw = random.Random(args.seed)
    tokens = {place: draw.randint(10, 60) for place in range(args.requests)}
    send(port, "warm", tokens, args.gap)
    records = send(port, "all", tokens, args.gap)
    rows = []
    for victim in sorted(records, key=lambda place: -waited(records[place]))[: args.victims]:
        answer = call(port, "GET", records[victim]["blame"])
        worst = max(answer["others"], key=lambda other: other["wait_ms"])
        without = {place: count for place, count in tokens.items() if place != int(worst["id"].rpartition("-")[2])}
        again = send(port, f"no-{victim}", without, args.gap)[victim]
        wait, latency = waited(records[victim]), answer["latency_ms"]
        gained = wait - waited(again)
        rows.append(
            {
                "wait_ms": wait, "said_ms": worst["wait_ms"], "measured_ms": gained,
                "error": (gained - worst["wait_ms"]) / wait, "residual": answer["wait_ms"]["residual"] / wait,
                "off": latency["simulated"] / latency["measured"] - 1,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = report.parser("blame", __doc__)
    report.add_server(parser)
    parser.add_argument("--policies", nargs="+", default=["nobatch", "dynamic", "static"], help="policies to test")
    parser.add_argument("--max-batch-size", default="2", help="slots of the server")
    parser.add_argument("--requests", type=int, default=16, help="of a load (16)")
    parser.add_argument("--gap", type=float, default=0.05, help="seconds between two requests (0.05)")
    parser.add_argument("--victims", type=int, default=4, help="requests that are asked about (4)")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    lines = []
    for policy in args.policies:
        args.policy = policy
        with served(args, "--access-log", "off", "--max-batch-size", args.max_batch_size) as server:
            rows = result[policy] = measure(server.port, args)
        for row in rows:
            lines.append([policy, *(f"{v:,.0f}" if k.endswith("_ms") else f"{v:+.1%}" for k, v in row.items())])
    report.show("the wait of a request without its worst culprit, ms", ("policy", *rows[0]), lines)
    errors = [abs(row["error"]) for rows in result.values() for row in rows]
    result |= {"median_error": statistics.median(errors), "largest_error": max(errors)}
    report.finish("blame", result, args.json)


if __name__ == "__main__":
    main()

"""Time the loop itself, with a model whose steps take no time.

    python -m benchmarks.mock --json benchmarks/results/mock.json

A full batch of a mock model decodes behind the real `BatchingManager`, with KV pages and the observers of a server. The
time from step to step is that of planning, bookkeeping and publishing tokens.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import policies
from batching import BatchingManager, Inference
from benchmarks import report
from costs import mock
from costs.mock import MockModel
from costs.published import Constant
from observe.feed import Feed
from observe.meters import Meters
from scheduling.pages import PagePool


def measure(policy: str, slots: int, tokens: int) -> dict[str, Any]:
    """Decode `tokens` tokens for each of `slots` requests; return how long a step of the loop took."""
    ends: list[float] = []
    manager = BatchingManager(
        MockModel(Constant(0.0, 0.0)),
        pages=PagePool(mock.kv_pages(mock.GPT2, 0, slots), mock.PAGE_SIZE),
        max_batch_size=slots,
        max_queue=slots,
    )
    feed, meters = Feed(), Meters()
    manager.observers += [feed.observe, meters.observe, lambda iteration, left: ends.append(time.perf_counter())]
    manager.listeners += [feed.on_arrival, meters.on_arrival]
    manager.start(policies.get_policy(policy, slots))
    asked = [Inference("", tokens, [i, *range(100)], id=str(i)) for i in range(slots)]
    manager.enqueue_all(asked)
    for inference in asked:
        inference.wait_for_completion(600)
    manager.stop()
    steps = [b - a for a, b in itertools.pairwise(ends[1:])]  # the first computes prompts
    p99 = statistics.quantiles(steps, n=100)[98]
    return {
        "policy": policy, "running": slots, "steps": len(steps),
        "median_us": 1e6 * statistics.median(steps), "p99_us": 1e6 * p99,
    }  # fmt: skip


def main() -> None:
    parser = report.parser("mock", __doc__)
    parser.add_argument("policies", nargs="*", default=["static", "dynamic", "chunked", "dynamic+vtc"])
    parser.add_argument("--max-batch-size", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=800, help="of a request (default %(default)s)")
    args = parser.parse_args()
    rows = [measure(policy, args.max_batch_size, args.tokens) for policy in args.policies]
    lines = [[f"{v:.0f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    report.show("time of a step beside the model's", rows[0], lines)
    report.finish("mock", {"loops": rows}, args.json)


if __name__ == "__main__":
    main()

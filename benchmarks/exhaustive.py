"""Whether each policy keeps the laws in all arrivals of a few short requests, and what it takes to decide that.

    python -m benchmarks.exhaustive --json benchmarks/results/exhaustive.json

Each policy is gone through as `python -m simulate check POLICY --exhaustive` does. States and runs are the same on every
machine, and seconds are of the processor.
"""

from __future__ import annotations

import os
import time
from functools import partial
from multiprocessing import Pool
from typing import Any

from benchmarks import report
from policies import names, order_names
from simulate.check import check_exhaustively
from simulate.exhaustive import DEFAULT_SCOPE, Scope


def decide(name: str, scope: Scope) -> tuple[str, dict[str, Any]]:
    """Return a policy with the states and runs of its scope, and the law that it breaks, if it does."""
    began = time.process_time()
    found = check_exhaustively(name, scope)
    law = found.broken and found.broken.law
    return name, {
        "states": found.states, "runs": found.cases, "broken": law, "cpu_s": round(time.process_time() - began, 1),
    }  # fmt: skip


def main() -> None:
    """Print what was decided, and write it to the file of --json after each policy."""
    parser = report.parser("exhaustive", __doc__)
    every = [*names(), *(f"dynamic+{order}" for order in order_names())]
    parser.add_argument(
        "--policies", nargs="+", default=every, help="(default: each loop, and dynamic with each order)"
    )
    parser.add_argument("--more", nargs="+", default=[], help="policies beside these")
    parser.add_argument("--requests", type=int, default=DEFAULT_SCOPE.requests)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    scope, decided = Scope(args.requests), dict[str, Any]()
    asked = [*args.policies, *args.more]
    with Pool(args.processes) as pool:
        for name, found in pool.imap_unordered(partial(decide, scope=scope), asked):
            decided[name] = found
            result = {
                "scope": str(scope), "asked": len(asked), "decided": len(decided),
                "broken": sum(bool(one["broken"]) for one in decided.values()), "policies": decided,
            }  # fmt: skip
            report.keep(args.json, result)
    report.finish("exhaustive", result, args.json)


if __name__ == "__main__":
    main()

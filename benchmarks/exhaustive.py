"""Whether policies keep the laws in all arrivals of a few short requests, as `simulate check --exhaustive` decides it.

    python -m benchmarks.exhaustive --json benchmarks/results/exhaustive.json

Policies that the file has already are not gone through again. States and runs are the same on every machine, and seconds are
of the processor.
"""

from __future__ import annotations

import json
import time
from multiprocessing import Pool
from typing import Any

from rich.console import Console

from benchmarks import report
from policies import names, order_names
from simulate.laws.check import check_exhaustively
from terminal.progress import counted


def decide(name: str) -> tuple[str, dict[str, Any]]:
    """Return a policy with the states and runs of the scope, and the law that it breaks, if it does."""
    began = time.process_time()
    found = check_exhaustively(name)
    broken = found.broken and found.broken.law
    took = round(time.process_time() - began, 1)
    return name, {"states": found.states, "runs": found.cases, "broken": broken, "cpu_s": took}


def main() -> None:
    """Print what was decided, and write it to the file of --json after each policy."""
    parser = report.parser("exhaustive", __doc__)
    every = [*names(), *(f"dynamic+{order}" for order in order_names())]
    parser.add_argument("policies", nargs="*", default=every, help="(default: each loop, and dynamic with each order)")
    args = parser.parse_args()
    decided = json.loads(args.json.read_text())["policies"] if args.json and args.json.exists() else {}
    names_left = [name for name in args.policies if name not in decided]
    with counted(Console(stderr=True), len(names_left), "policies decided") as progress, Pool() as pool:
        for number, (name, found) in enumerate(pool.imap_unordered(decide, names_left), 1):
            decided[name] = found
            report.keep(args.json, {"policies": decided})
            progress(number)
    report.finish("exhaustive", {"policies": decided}, args.json)


if __name__ == "__main__":
    main()

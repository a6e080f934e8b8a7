"""Whether the receipt of `./eb switch` lies: experiments on the simulator's clock, by the same statistics as live ones.

    python -m dev.benchmarks.receipts --json dev/benchmarks/results/receipts.json

Without an effect, A and B are the same policy: at several loads, in a load that drifts, and with a client that bursts in one
window. A planted effect lengthens or shortens each answer of B by 10 % of its time. Traffic is enough where the receipt says
so. A switch is from one order to another; serving what came before it with both predicts its effect.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import policies
from client.report import receipt
from client.report.receipt import Request, Window
from costs.cost import Affine, Host
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence as Asked
from simulate.simulator import Simulation

SLOTS = 8
LAW = Affine(base=0.02, decode=0.001, prompt=0.0001)
MEAN_TOKENS = 40
BURST = 60  # requests of one client at once
Times = Callable[[np.random.Generator, float, float], np.ndarray]


class Switching(Simulation):
    """A server that is switched at the begin of each window, at the first moment at which its loop can do so."""

    def __init__(self, asked: list[Asked], arms: dict[str, str], order: str, seconds: float) -> None:
        self._make = {arm: partial(policies.get_policy, name, SLOTS) for arm, name in arms.items()}
        super().__init__(Scheduler(self._policy(order[0])), asked, LAW, Host())
        self.windows = [Window(order[0], 0.0, seconds)]
        self._order, self._seconds = order, seconds

    def _policy(self, arm: str) -> Policy:
        return self._make[arm]()

    def deliver(self) -> None:
        """Switch if a window has ended, then let arrive what has arrived."""
        while len(self.windows) < len(self._order) and self.now >= self.windows[-1].end:
            last = self.windows[-1]
            arm = self._order[len(self.windows)]
            self.scheduler.switch(self._policy(arm), self.now)
            self.windows.append(Window(arm, last.end, last.end + self._seconds))
        super().deliver()


def poisson(rng: np.random.Generator, rate: float, seconds: float) -> np.ndarray:
    """Return arrivals at an even rate."""
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))


def drifting(rng: np.random.Generator, rate: float, seconds: float) -> np.ndarray:
    """Return arrivals whose rate grows from half to one and a half times `rate`."""
    u = rng.uniform(size=rng.poisson(rate * seconds))
    return np.sort(seconds * (np.sqrt(0.25 + 2 * u) - 0.5))


def asked(rng: np.random.Generator, times: np.ndarray, burst_at: float | None = None) -> list[Asked]:
    """Return requests of four clients, and of one more that sends many at once."""
    rows = [(at, f"client {rng.integers(4)}") for at in times]
    if burst_at is not None:
        rows += [(burst_at, "burst")] * BURST
    return [
        Asked([0] * int(rng.integers(10, 100)), max(1, int(rng.exponential(MEAN_TOKENS))), id=str(i), arrived_at=at, client=client)
        for i, (at, client) in enumerate(sorted(rows))
    ]  # fmt: skip


def order_of(rng: np.random.Generator, pairs: int) -> str:
    """Return the arms of the windows, in random order within each pair."""
    return "".join(["AB", "BA"][rng.integers(2)] for _ in range(pairs))


def planted(requests: Sequence[Request], windows: Sequence[Window], effect: float) -> list[Request]:
    """Return the requests, each time of those that arrived under B longer by this share."""
    begins = [w.begin for w in windows]
    rows = []
    for one in requests:
        arm = windows[max(0, int(np.searchsorted(begins, one.at, "right")) - 1)].arm
        more = 1 + effect * (arm == "B")
        first, end = (one.at + more * ((t or one.at) - one.at) for t in (one.first, one.end))  # all have ended
        rows.append(one._replace(first=first, end=end))
    return rows


def seen_at(requests: Sequence[Request], now: float) -> list[Request]:
    """Return what was known of the requests at a time."""

    def known(time: float | None) -> float | None:
        return time if time is not None and time <= now else None

    return [one._replace(first=known(one.first), end=known(one.end)) for one in requests if one.at <= now]


def capacity() -> float:
    """Return the requests a second with all slots taken."""
    return SLOTS / (MEAN_TOKENS * (LAW.base + SLOTS * LAW.decode) + 55 * LAW.prompt)


def experiment(
    seed: int, load: float = 0.5, pairs: int = 20, seconds: float = 30.0, arms: dict[str, str] | None = None, effect: float = 0.0,
    times: Times = poisson, bursts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the receipt of an experiment, which ends at the first look that shows an effect."""
    rng = np.random.default_rng(seed)
    order, length = order_of(rng, pairs), 2 * pairs * seconds
    burst_at = float(rng.uniform(0.2, 0.9) * length) if bursts else None
    rows = asked(rng, times(rng, load * capacity(), length), burst_at)
    run = Switching(rows, arms or {"A": "dynamic", "B": "dynamic"}, order, seconds)
    run.run()
    requests = [
        Request(s.id, s.arrived_at, s.first_token_at, s.finished_at, len(s.output_ids), s.client)
        for s in run.result.sequences
    ]
    requests = planted(requests, run.windows, effect)
    found: dict[str, Any] = {}
    for done in filter(lambda done: receipt.is_look(done, pairs), range(1, pairs + 1)):
        windows = run.windows[: 2 * done]
        found = receipt.receipt(seen_at(requests, windows[-1].end), windows, windows[-1].end, pairs)
        if found["verdict"] in (receipt.TAKE_B, receipt.KEEP_A):
            break
    return found


CASES: dict[str, dict[str, Any]] = {
    "A/A, load 0.3": {"load": 0.3},
    "A/A, load 0.5": {},
    "A/A, load 0.7": {"load": 0.7},
    "A/A, load 0.85": {"load": 0.85, "seconds": 60.0},
    "A/A, drift": {"times": drifting},
    "A/A, burst": {"bursts": True},
    "+10 %, load 0.3": {"load": 0.3, "effect": 0.1},
    "+10 %, load 0.5": {"effect": 0.1},
    "-10 %, load 0.5": {"effect": -0.1},
    "+10 %, load 0.7": {"load": 0.7, "effect": 0.1},
    "+10 %, drift": {"times": drifting, "effect": 0.1},
}


def summary(case: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many of the receipts say what, and whether the traffic was enough."""
    planned = (
        CASES[case]["seconds"] * 2 * found[0]["planned"] if "seconds" in CASES[case] else 60.0 * found[0]["planned"]
    )
    enough = [f for f in found if f["needed_s"] and f["needed_s"] <= planned]
    told = (receipt.TAKE_B, receipt.KEEP_A)
    return {
        "runs": len(found), "verdicts": dict(Counter(f["verdict"] for f in found)), "enough": len(enough),
        "found": sum(f["verdict"] in told for f in enough), "pairs": float(np.mean([f["done"] for f in found])),
    }  # fmt: skip


def _one(case: str, seed: int) -> dict[str, Any]:
    return experiment(seed, **CASES[case])


def main() -> None:
    """Run the experiments and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    with ProcessPoolExecutor(2) as pool:
        for case in args.cases:
            seeds = range(1000, 1000 + args.runs)
            results[case] = summary(case, list(pool.map(partial(_one, case), seeds)))
            print(case, json.dumps(results[case]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

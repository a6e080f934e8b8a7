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
from simulate.simulator import Simulation, simulate

SLOTS = 8
LAW = Affine(base=0.02, decode=0.001, prompt=0.0001)
MEAN_TOKENS = 40
EARLIER = 400  # requests before an experiment; /what-if takes 200
BURST = 60  # requests of one client at once
LIMITS = {"e2el": 2000.0}  # ms
TOLD = (receipt.TAKE_B, receipt.KEEP_A)
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


def forecast(rng: np.random.Generator, load: float, arms: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return the changes that the simulation of earlier requests with both policies predicts."""
    rows, sides = asked(rng, poisson(rng, load * capacity(), EARLIER / (load * capacity()))), []
    for name in arms.values():
        fresh = [Asked(r.prompt_ids, r.max_tokens, id=r.id, arrived_at=r.arrived_at, client=r.client) for r in rows]
        simulate(Scheduler(policies.get_policy(name, SLOTS)), fresh, LAW)
        sides.append([request_of(one) for one in fresh])
    return receipt.predicted(sides[0], sides[1], 0.0, LIMITS)


def request_of(seq: Asked) -> Request:
    """Return what a server tells of a request."""
    return Request(seq.id, seq.arrived_at, seq.first_token_at, seq.finished_at, len(seq.output_ids), seq.client)


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
    before = forecast(rng, load, arms) if arms else None
    rows = asked(rng, times(rng, load * capacity(), length), burst_at)
    run = Switching(rows, arms or {"A": "dynamic", "B": "dynamic"}, order, seconds)
    run.run()
    requests = planted([*map(request_of, run.result.sequences)], run.windows, effect)
    found: dict[str, Any] = {}
    for done in receipt.looks_of(pairs):
        windows = run.windows[: 2 * done]
        found = receipt.receipt(seen_at(requests, windows[-1].end), windows, windows[-1].end, pairs, before, LIMITS)
        if found["verdict"] in TOLD:
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
    "+10 %, load 0.7": {"load": 0.7, "pairs": 40, "effect": 0.1},
    "+10 %, drift": {"times": drifting, "effect": 0.1},
    "dynamic to sjf, load 0.7": {"load": 0.7, "arms": {"A": "dynamic", "B": "dynamic+sjf"}},
    "dynamic to sjf, load 0.85": {"load": 0.85, "seconds": 60.0, "arms": {"A": "dynamic", "B": "dynamic+sjf"}},
    "dynamic to nobatch, load 0.1": {"load": 0.1, "pairs": 12, "arms": {"A": "dynamic", "B": "nobatch"}},
    "static to dynamic, load 0.15": {"load": 0.15, "pairs": 12, "arms": {"A": "static", "B": "dynamic"}},
}


def summary(case: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many of the receipts say what, of those with enough traffic how many found an effect, and with a wrong sign."""
    goals = [one["figures"][receipt.GOAL] for one in found]
    enough = [one for one in found if one["needed_s"] and one["needed_s"] <= one["planned"] * one["pair_s"]]
    wrong = (
        {receipt.TAKE_B if CASES[case].get("effect", 0) > 0 else receipt.KEEP_A} if CASES[case].get("effect") else set()
    )
    goodput, p99 = ([one["figures"][name] for one in found] for name in ("goodput", receipt.P99))
    held, held_goodput = ([one["held"] for one in each if one.get("held") is not None] for each in (goals, goodput))
    return {
        "runs": len(found), "verdicts": dict(Counter(one["verdict"] for one in found)), "enough": len(enough),
        "found": sum(one["verdict"] in TOLD for one in enough), "wrong": sum(one["verdict"] in wrong for one in found),
        "pairs": float(np.mean([one["done"] for one in found])), "change": float(np.median([goal["change"] for goal in goals])),
        "held": sum(held) if held else None,
        "goodput_differs": sum(one["low"] > 0 or one["high"] < 0 for one in goodput),
        "p99_differs": sum(one["low"] > 0 or one["high"] < 0 for one in p99),
        "goodput_held": sum(held_goodput) if held_goodput else None,
    }  # fmt: skip


def _one(case: str, seed: int) -> dict[str, Any]:
    return experiment(seed, **CASES[case])


def main() -> None:
    """Run the experiments and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    with ProcessPoolExecutor() as pool:
        for case in args.cases:
            seeds = range(1000, 1000 + args.runs)
            results[case] = summary(case, list(pool.map(partial(_one, case), seeds)))
            print(case, json.dumps(results[case]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

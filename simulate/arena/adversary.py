"""Search for the requests that are worst for a policy: by how many times another policy, or the bound, serves them better.

A trace is a `Case` whose times are milliseconds. From random traces the search goes uphill: it changes one or two requests,
keeps what is no better for the policy, and starts again when that has not helped for a while. The worst trace is made small
(`shrink.py`) as long as its ratio stays. Chance comes from the seed alone. This module must not know files or command lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from costs.cost import Cost, Host
from costs.steps import decoding
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.best.bounds import bounds
from simulate.laws.case import Case, Request
from simulate.laws.shrink import Shrinker
from simulate.simulator import simulate

PATIENCE = 150  # changes in a row that do not help, after which the search starts again
KEPT = 0.995  # of the ratio, when the trace is made smaller
CLIENTS, PRIORITIES = "ab", (0, 1)
MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], tuple[float, float]]] = {
    "mean": lambda own, other: (float(own.mean()), float(other.mean())),
    "p99": lambda own, other: (float(np.percentile(own, 99)), float(np.percentile(other, 99))),
    "max": lambda own, other: (float(own.max()), float(other.max())),
    "slowdown": lambda own, other: max(zip(own.tolist(), other.tolist()), key=lambda pair: pair[0] / pair[1]),
}


@dataclass(frozen=True)
class Finding:
    """How a policy and its rival serve a trace: the measure of both and the latencies of the requests, in seconds.

    Of the bound only the mean is known: it has no latencies.
    """

    own: float
    other: float
    latencies: tuple[list[float], list[float]]

    @property
    def ratio(self) -> float:
        return self.own / self.other


@dataclass(frozen=True)
class Duel:
    """A policy and its rival, another policy or, where that is None, the bound, on one machine."""

    policy: Callable[[], Scheduler]
    rival: Callable[[], Scheduler] | None
    cost: Cost
    host: Host
    measure: str = "mean"

    def serve(self, sequences: Callable[[], list[Sequence]]) -> Finding:
        """Serve fresh requests on each side and compare; ValueError if some are refused."""
        own = self._latencies(self.policy, sequences())
        if self.rival is None:
            alike = [1.0] * len(own)
            least = bounds(sequences(), self.cost, self.policy().policy.slots, self.host, weights=alike).mean_latency
            return Finding(float(own.mean()), least, (own.tolist(), []))
        other = self._latencies(self.rival, sequences())
        return Finding(*MEASURES[self.measure](own, other), (own.tolist(), other.tolist()))

    def _latencies(self, make: Callable[[], Scheduler], sequences: list[Sequence]) -> np.ndarray:
        run = simulate(make(), sequences, self.cost, self.host)
        if run.answered < run.requests:
            raise ValueError(f"{run.policy} refuses requests, which have no latency then. Use another policy")
        return run.latency


class Adversary:
    """The search of one duel for a trace of so many requests, with prompts and answers of up to `longest` tokens."""

    def __init__(self, duel: Duel, requests: int, longest: int, seed: int) -> None:
        self.duel, self.requests, self.longest = duel, requests, longest
        self.rng = random.Random(seed)
        self.span = max(1, round(1000 * requests * longest * duel.cost.seconds(decoding(1, longest, longest)) / 2))

    def search(self, tries: int) -> tuple[Finding, Case]:
        """Try so many traces; return what the worst one shows, made small."""
        best = here = self._start()
        fruitless = 0
        for _ in range(tries - 1):
            new = self._start() if fruitless >= PATIENCE else self._changed(here[1])
            if fruitless >= PATIENCE or _ratio(new) > _ratio(here):
                here, fruitless = new, 0
            else:
                here, fruitless = max(new, here, key=_ratio), fruitless + 1
            best = max(best, here, key=_ratio)
        least = KEPT * _ratio(best)

        def again(simpler: Case) -> Finding | None:
            found = self.duel.serve(partial(sequences_of, simpler))
            return found if found.ratio >= least else None

        return Shrinker(again, best[1], best[0]).run()

    def _start(self) -> tuple[Finding, Case]:
        return self._of([self._drawn() for _ in range(self.requests)])

    def _of(self, requests: list[Request]) -> tuple[Finding, Case]:
        """Serve a trace and return the finding with its case, whose single slot leaves the shrinker no room to take away."""
        case = Case(tuple(sorted(requests, key=lambda r: r.arrival)), slots=1)
        return self.duel.serve(partial(sequences_of, case)), case

    def _drawn(self) -> Request:
        rng = self.rng
        return Request(
            rng.choice((0, rng.randrange(self.span))), (0,) * self._length(), self._length(), rng.choice(CLIENTS),
            rng.choice(PRIORITIES),
        )  # fmt: skip

    def _length(self) -> int:
        """Return a length: short ones as likely as long ones."""
        return round(float(self.longest ** self.rng.random()))

    def _changed(self, case: Case) -> tuple[Finding, Case]:
        """Try the trace with other arrivals, lengths, clients or priorities of one or two requests."""
        rng, requests = self.rng, list(case.requests)
        for _ in range(rng.choice((1, 1, 2))):
            i = rng.randrange(len(requests))
            old, new = requests[i], self._drawn()
            near = max(0, old.arrival + rng.choice((-1, 1)) * round(self.span ** rng.random()))
            at = rng.choice((near, near, new.arrival, requests[rng.randrange(len(requests))].arrival))
            requests[i] = rng.choice((
                replace(old, arrival=at), replace(old, arrival=at), replace(old, prompt=new.prompt),
                replace(old, output=new.output), replace(old, client=new.client, priority=new.priority), new,
            ))  # fmt: skip
        return self._of(requests)


def _ratio(pair: tuple[Finding, Case]) -> float:
    return pair[0].ratio


def sequences_of(case: Case) -> list[Sequence]:
    """Return fresh sequences whose times are seconds after the first arrival."""
    fresh = case.sequences()
    first = min(seq.arrived_at for seq in fresh)
    for seq in fresh:
        seq.arrived_at = (seq.arrived_at - first) / 1000
    return fresh

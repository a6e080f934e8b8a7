"""Capacity: the highest rate at which a policy meets its limits, and the replicas that a load needs.

Rates are bisected with common random numbers: one schedule at one request a second, played faster or slower. A run
whose queue grows fails, whatever its percentiles are. This module must not know where the cost comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from costs.cost import Scaled
from simulate import result
from simulate.measured.intervals import SHARES, Interval, Noise
from simulate.rows import Rows
from simulate.scenario import Chosen, Scenario
from simulate.simulator import Run

UNSTEADY = ("burst", "ramp")  # arrivals without a rate that could be held
WARM_UP = 0.1  # of the requests
TOLERANCE = 0.02  # of the highest rate
SEGMENTS = 20
STUDENT = 2.10  # two-sided 95 % with 18 degrees of freedom


@dataclass(frozen=True)
class Limit:
    """`statistic` (mean, p50 ... p99.9) of `measure` (ttft, itl, tpot, e2el, norm, queue, program) is at most `bound` seconds.

    `norm` is the latency of a request per token of its answer (Orca's normalized latency).
    """

    measure: str
    statistic: str
    bound: float

    def __str__(self) -> str:
        return f"{self.statistic} {self.measure} <= {self.bound:g} s"

    def value(self, run: Run, skip: int) -> float:
        """Return the statistic of a run without its first `skip` requests, or that share of its gaps or programs."""
        measures: dict[str, Callable[[], np.ndarray]] = {
            "ttft": lambda: run.ttft, "tpot": lambda: result.tpots(run), "e2el": lambda: run.latency,
            "norm": lambda: run.latency / run.tokens, "queue": lambda: run.waiting, "itl": lambda: np.frombuffer(run.gaps or bytes(8)),
            "program": lambda: np.array([*run.loop.times(run.host.alpha1).values()] if run.loop else [0.0]),
        }  # fmt: skip
        values = measures[self.measure]()
        values = values[int(len(values) * skip / max(run.answered, 1)) :]
        if self.statistic == "mean":
            return float(values.mean())
        return float(np.percentile(values, float(self.statistic.removeprefix("p"))))


def parse_limit(text: str) -> Limit:
    """Read a limit as in `p99:ttft:1`; ValueError with an example."""
    statistic, _, rest = text.partition(":")
    measure, _, bound = rest.partition(":")
    try:
        good = statistic == "mean" or 0 <= float(statistic.removeprefix("p")) <= 100
        if good and measure in ("ttft", "itl", "tpot", "e2el", "norm", "queue", "program") and float(bound) > 0:
            return Limit(measure, statistic, float(bound))
    except ValueError:
        pass
    raise ValueError(
        f"cannot read the limit {text!r}. Use statistic:measure:seconds, as in p99:ttft:1, p99:itl:0.1, mean:e2el:5, "
        "with ttft, itl, tpot, e2el, norm, queue or program"
    )


DEFAULT_LIMITS = (Limit("ttft", "p99", 1.0), Limit("itl", "p99", 0.1))


def queue_grows(arrival: np.ndarray, latency: np.ndarray, until: float | None = None) -> bool:
    """Whether the number in system has a positive slope with 95 % confidence that doubles it over the run.

    The numbers are means over segments of time, so that neighbors are hardly correlated. The last ends at `until`, by
    default at the last arrival.
    """
    edges = np.linspace(arrival[0], arrival[-1] if until is None else until, SEGMENTS + 1)
    if edges[-1] <= edges[0]:
        return False
    inside = np.zeros(SEGMENTS)
    for k, (a, b) in enumerate(pairwise(edges)):
        inside[k] = np.clip(np.minimum(arrival + latency, b) - np.maximum(arrival, a), 0, None).sum()
    inside /= edges[1] - edges[0]
    x = np.arange(SEGMENTS) - (SEGMENTS - 1) / 2
    slope = (x * inside).sum() / (x * x).sum()
    rest = inside - inside.mean() - slope * x
    error = math.sqrt((rest * rest).sum() / (SEGMENTS - 2) / (x * x).sum())
    return bool(slope > STUDENT * error and slope * SEGMENTS > inside.mean())


@dataclass(frozen=True)
class Capacity:
    """The highest rate is between `low`, which meets all limits, and `high`, which does not because of `binds`."""

    low: float
    high: float
    binds: str
    runs: int = 0

    def replicas(self, rate: float) -> int:
        """Return how many replicas sustain `rate` when requests are split at random, so that each stream is Poisson."""
        return math.ceil(rate / self.low - 1e-9) if self.low else 0


def breaks(run: Run, limits: Sequence[Limit]) -> str:
    """Return the first limit that a run breaks, in words; "" if it meets all."""
    skip = int(run.answered * WARM_UP)
    if run.answered < run.requests:
        return f"{run.requests - run.answered} refused"
    # The calls of the last programs come ever more rarely, so a queue that has grown shrinks again.
    until = max(run.loop.began.values(), default=None) if run.loop else None
    if queue_grows(run.arrival, run.latency, until):
        return "the queue grows"
    for limit in limits:
        if limit.value(run, skip) > limit.bound:
            return str(limit)
    return ""


def capacity(scenario: Scenario[Rows], chosen: Chosen, limits: Sequence[Limit] = DEFAULT_LIMITS) -> Capacity:
    """Return the highest rate at which a policy meets all limits; the requests come at one a second.

    The search begins at the rate at which a backlog is served, which no sustained rate can much exceed.
    """

    def serve(rows: Rows) -> Run:
        return replace(scenario, rows=rows).serve(chosen)

    unit = scenario.rows
    flood = serve(replace(unit, at=np.zeros(len(unit.at))))
    runs, low, high, binds = 1, 0.0, 1.5 * len(flood.done) / flood.makespan, "the queue grows"
    at = high / 2
    while low < (1 - TOLERANCE) * high and at > 1e-6 * high:
        runs += 1
        broken = breaks(serve(unit.faster(at)), limits)
        if broken:
            high, binds = at, broken
        else:
            low = at
        # Rates are bisected as ratios, once some rate holds.
        at = math.sqrt(low * high) if low else high / 2
        if not low and high < 1e-4:
            break
    return Capacity(low, high, binds, runs)


def interval(
    scenario: Scenario[Rows], chosen: Chosen, limits: Sequence[Limit], found: Capacity, noise: Noise | None
) -> Interval:
    """Return the interval of the capacity: from the one found on a slow machine to the one on a fast machine.

    These are the quantiles of the drift. Residuals of single steps hardly move a rate held for thousands of them. An exact
    law leaves the bounds of the search.
    """
    low, high = found.low, found.high
    if noise is not None:
        factors = noise.factors(SHARES)
        fast, slow = (capacity(replace(scenario, cost=Scaled(scenario.cost, f)), chosen, limits).low for f in factors)
        low, high = min(low, slow), max(high, fast)
    return Interval(low, high)

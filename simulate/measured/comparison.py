"""What a simulated run and a real server's run of the same requests have in common, figure by figure, and the bounds.

Outcomes are those of the client, with times from the start of the run; records are those that a server's /events sends.
It must not know how either run was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from simulate.logs import steps
from simulate.measured.intervals import Interval, statistics
from simulate.measured.served import Record, Served, program_seconds
from simulate.simulator import Run

MAKESPAN = 0.05
LATENCY, SATURATED_LATENCY = 0.10, 0.25  # of the mean and of p99
SATURATED = 0.8  # utilization from which waiting amplifies every error, and the makespan is the engine's
TTFT = 0.20
BOUNDS = (
    f"mean and p99 latency, and mean program time, within {LATENCY:.0%}, or {SATURATED_LATENCY:.0%} above a utilization of {SATURATED:.0%}; mean TTFT "
    f"within {TTFT:.0%}; makespan within {MAKESPAN:.0%} above that utilization (below it, the arrivals determine the makespan)"
)


@dataclass(frozen=True)
class Comparison:
    """One figure, predicted and measured; `bound` is relative, None where nothing is promised.

    `interval` is where the measurement is expected in 90 of 100 runs, None where that is not known.
    """

    name: str
    predicted: float
    measured: float
    bound: float | None = None
    unit: str = "s"
    interval: Interval | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float("inf")

    @property
    def good(self) -> bool:
        return self.bound is None or abs(self.error) <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return {**asdict(self), "error": self.error, "good": self.good}


def compare(run: Run, served: Served, intervals: Mapping[str, Interval] | None = None) -> list[Comparison]:
    """Compare a simulated run with what a client and the server saw; `intervals` by figure."""
    outcomes, records = served.outcomes, served.records
    makespan = max(o.ended for o in outcomes) - min(o.intended for o in outcomes)
    busy = sum(record["seconds"] for record in records) / makespan
    comparisons = [
        Comparison("utilization", run.busy / run.makespan, busy, unit="%"),
        Comparison("makespan", run.makespan, makespan),
        *_statistics("latency", run.latency, np.array([outcome.latency for outcome in outcomes])),
        *_statistics("TTFT", run.ttft, np.array([o.ttft for o in outcomes if o.ttft is not None])),
        *_statistics("program time", _program_seconds(run), program_seconds(outcomes, served.calls)),
        *_statistics("ITL", np.frombuffer(run.gaps), token_gaps(records)),
    ]
    if records:
        predicted, measured = (float(np.mean(list(batch_sizes(side).elements()))) for side in (steps_of(run), records))
        comparisons.append(Comparison("mean batch size", predicted, measured, unit=""))
    above = busy > SATURATED
    latency = SATURATED_LATENCY if above else LATENCY
    bounds = {"mean latency": latency, "p99 latency": latency, "mean program time": latency, "mean TTFT": TTFT}
    bounds |= {"makespan": MAKESPAN} if above else {}
    return [replace(c, bound=bounds.get(c.name), interval=(intervals or {}).get(c.name)) for c in comparisons]


def _program_seconds(run: Run) -> np.ndarray:
    return np.array([*run.loop.times(run.host.alpha1).values()] if run.loop else [])


def _statistics(kind: str, predicted: np.ndarray, measured: np.ndarray) -> list[Comparison]:
    real = statistics(kind, measured)
    return [Comparison(name, value, real[name]) for name, value in statistics(kind, predicted).items() if real]


def token_gaps(records: Sequence[Record]) -> np.ndarray:
    """Return the seconds between two tokens of a request, of all requests, by the steps that computed them.

    What a client sees differs: a stream may carry several tokens at once.
    """
    gaps = [
        gap / count
        for request in steps.requests(records)
        for gap, count in zip(np.diff(request["chunks"]), request["counts"][1:])
        for _ in range(count)
    ]
    return np.array(gaps)


def steps_of(run: Run) -> list[Record]:
    """Return the steps of a simulated run as a server's records have them."""
    return [iteration.to_dict() for iteration in run.iterations]


def batch_sizes(records: Sequence[Record]) -> Counter[int]:
    """Count the steps of each batch size; rows that are held and computed on belong to it."""
    return Counter(sum(m["phase"] != "idle" for m in record["members"]) for record in records)


def agreement(predicted: Sequence[Record], measured: Sequence[Record]) -> float:
    """Return the share of steps whose batch has the same requests on both sides, when steps may be shifted in time."""
    sides = [
        Counter(frozenset(m["id"] for m in record["members"]) for record in records)
        for records in (predicted, measured)
    ]
    return (sides[0] & sides[1]).total() / max(len(predicted), len(measured), 1)

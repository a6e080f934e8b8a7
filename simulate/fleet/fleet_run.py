"""The result of a fleet's run, as columns: a million requests leave a few numbers each."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import numpy as np

from scheduling.sequence import Sequence
from simulate.result import tpots
from simulate.simulator import Run

TIMES = ("scheduled_at", "first_token_at", "finished_at")
COLUMNS = ("arrived_at", *TIMES, "prompt", "output", "cached", "replica")


@dataclass
class FleetRun(Run):
    """Times and lengths of each request, in order of arrival, and the sums of the steps of all replicas.

    `sequences` is empty. A request that was refused has no times. `replicas` is the most that could get new requests at
    the same time. `history` has the numbers of replicas that were ready, starting and draining, from each time on at which
    one of them changed.
    """

    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    replicas: int = 0
    history: list[tuple[float, int, int, int]] = field(default_factory=list)
    replica_seconds: float = 0.0

    def arrive(self, seq: Sequence, replica: int) -> None:
        """Note a request and the replica that got it."""
        for name in COLUMNS:
            self.columns[name].append(math.nan)
        number = self.requests - 1
        self.columns["arrived_at"][number] = seq.arrived_at
        self.columns["prompt"][number] = len(seq.prompt_ids)
        self.columns["replica"][number] = replica

    def finish(self, number: int, seq: Sequence) -> None:
        """Note the answer of the request that was the `number`-th to arrive, from 0."""
        columns = self.columns
        for name in TIMES:
            columns[name][number] = getattr(seq, name) or 0.0
        columns["output"][number] = len(seq.output_ids)
        columns["cached"][number] = seq.cached

    @property
    def requests(self) -> int:
        return len(self.columns["arrived_at"])

    @property
    def answered(self) -> int:
        return int(self._is_answered.sum())

    @property
    def _is_answered(self) -> np.ndarray:
        return np.asarray(~np.isnan(np.array(self.columns["finished_at"])))

    def of_answered(self, name: str) -> np.ndarray:
        """Return a column of the answered requests."""
        return np.asarray(np.array(self.columns[name])[self._is_answered])

    @property
    def arrival(self) -> np.ndarray:
        return np.asarray(self.of_answered("arrived_at") - self.host.alpha0)

    def _since_arrival(self, name: str, more: float = 0.0) -> np.ndarray:
        return np.asarray(self.of_answered(name) + more - self.arrival)

    @property
    def tokens(self) -> np.ndarray:
        return self.of_answered("output").astype(int)

    @property
    def where(self) -> np.ndarray:
        """The number of the replica that each request was sent to."""
        return np.array(self.columns["replica"]).astype(int)

    @property
    def busiest(self) -> float:
        """The requests that were sent to the replica with the most, by the mean over `replicas`."""
        return int(np.bincount(self.where).max()) * self.replicas / self.requests

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in a prefix cache."""
        prompts = float(np.sum(self.columns["prompt"]))
        return float(self.of_answered("cached").sum()) / prompts if prompts else 0.0

    @property
    def replica_hours(self) -> float:
        """What the replicas cost: the hours from the start of each until it is gone, summed."""
        return self.replica_seconds / 3600

    def share_within(self, ttft: float | None, tpot: float | None, e2el: float | None) -> float:
        """Return the share of requests that meet all the limits given (seconds); refused ones do not."""
        good = np.ones(self.answered, bool)
        for limit, values in ((ttft, self.ttft), (tpot, tpots(self)), (e2el, self.latency)):
            if limit is not None:
                good &= values <= limit
        return float(good.sum()) / self.requests if self.requests else 1.0

    @property
    def mean_replicas(self) -> float:
        """The replicas over the run, starting and draining ones included."""
        span = self.ended - self.began
        return self.replica_seconds / span if span else 0.0

"""Many replicas behind a router: each with its own scheduler, all on one virtual clock.

Here an event heap is needed: the next event is the end of some replica's step, or an arrival, which the router gives to
a replica by what it knows then. A thousand replicas are only as slow as their steps together.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.costs import Cost

Router = Callable[["Fleet", Sequence], int]


@dataclass
class Fleet:
    """The replicas and what a router may look at: `load[i]` requests are with replica i."""

    schedulers: list[Scheduler]
    cost: Cost
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    load: list[int] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.load = [0] * len(self.schedulers)
        self._plans: dict[int, Plan] = {}
        self._events: list[tuple[float, int, int]] = []  # (time, replica, step that ends or 0)
        for scheduler in self.schedulers:
            scheduler.record = False

    def run(self, arrivals: Iterable[Sequence], route: Router) -> FleetRun:
        """Serve all arrivals; each goes to the replica that `route` names."""
        sequences = sorted(arrivals, key=lambda seq: seq.arrived_at)
        where = []
        for seq in sequences:
            self._until(seq.arrived_at)
            i = route(self, seq)
            where.append(i)
            self.load[i] += 1
            self.schedulers[i].add(seq)
            if i not in self._plans:
                self._turn(i, seq.arrived_at)
        for i, scheduler in enumerate(self.schedulers):
            scheduler.drain()
            if i not in self._plans:
                self._turn(i, sequences[-1].arrived_at if sequences else 0.0)
        self._until(math.inf)
        return FleetRun(sequences, np.array(where, dtype=int), self.steps)

    def _until(self, now: float) -> None:
        """Let everything happen that ends by `now`; what arrives at the end of a step is seen by the next."""
        while self._events and self._events[0][0] < now:
            at, i, number = heapq.heappop(self._events)
            if not number:  # a time to wake, which may have come to nothing meanwhile
                if i not in self._plans:
                    self._turn(i, at)
                continue
            plan = self._plans.pop(i)
            outputs = [0 if n == s.pending else None for s, n in zip(plan.sequences, plan.counts)]
            members = [*plan.sequences, *plan.held]
            self.schedulers[i].commit(plan, outputs, at)
            self.load[i] -= sum(1 for seq in members if seq.state == "finished")
            self._turn(i, at)

    def _turn(self, i: int, now: float) -> None:
        """Begin the next step of a replica, or have it woken when its policy wants to be."""
        scheduler = self.schedulers[i]
        plan = scheduler.plan(now)
        if plan is None:
            wake_at = scheduler.wake_at(now)
            if wake_at is not None and wake_at < math.inf:
                heapq.heappush(self._events, (max(wake_at, math.nextafter(now, math.inf)), i, 0))
            return
        self.steps += 1
        self._plans[i] = plan
        heapq.heappush(self._events, (now + self.cost(plan), i, plan.number))


@dataclass
class FleetRun:
    """Who was served when, and where."""

    sequences: list[Sequence]
    where: np.ndarray
    steps: int

    @property
    def latency(self) -> np.ndarray:
        return np.array([(s.finished_at or 0.0) - s.arrived_at for s in self.sequences])

    @property
    def ttft(self) -> np.ndarray:
        return np.array([(s.first_token_at or 0.0) - s.arrived_at for s in self.sequences])

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in a prefix cache."""
        prompts = sum(len(seq.prompt_ids) for seq in self.sequences)
        return sum(seq.cached for seq in self.sequences) / prompts if prompts else 0.0


def round_robin() -> Router:
    """Each in turn."""
    turn = -1

    def route(fleet: Fleet, seq: Sequence) -> int:
        nonlocal turn
        turn = (turn + 1) % len(fleet.load)
        return turn

    return route


def random_split() -> Router:
    """Anyone, by chance: what many independent front ends do."""
    return lambda fleet, seq: fleet.rng.randrange(len(fleet.load))


def least_loaded() -> Router:
    """Whoever has the fewest requests, the first of equals by chance."""

    def route(fleet: Fleet, seq: Sequence) -> int:
        least = min(fleet.load)
        start = fleet.rng.randrange(len(fleet.load))
        load = fleet.load
        return next(
            i % len(load) for i in range(start, start + len(load)) if load[i % len(load)] == least
        )

    return route


def power_of_two() -> Router:
    """The less loaded of two drawn by chance (Mitzenmacher, 2001)."""

    def route(fleet: Fleet, seq: Sequence) -> int:
        a, b = (fleet.rng.randrange(len(fleet.load)) for _ in range(2))
        return a if fleet.load[a] <= fleet.load[b] else b

    return route


def prefix_aware(slack: float = 2.0, page: int = 16) -> Router:
    """Whoever was last given the longest part of this prompt, unless it has `slack` times the mean load and 4 more.

    The router keeps its own map from the head of a prompt (whole pages) to a replica, so it asks nobody.
    """
    home: dict[tuple[int, int], int] = {}
    fallback = power_of_two()

    def route(fleet: Fleet, seq: Sequence) -> int:
        keys, key = [], 0
        for k in range(len(seq.prompt_ids) // page):
            key = hash((key, *seq.prompt_ids[k * page : (k + 1) * page]))
            keys.append((k, key))
        found = next((home[k] for k in reversed(keys) if k in home), None)
        mean = sum(fleet.load) / len(fleet.load)
        if found is None or fleet.load[found] > slack * mean + 4:
            found = fallback(fleet, seq)
        for k in keys:
            home[k] = found
        return found

    return route


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin, "random": random_split, "least-loaded": least_loaded,
    "power-of-two": power_of_two, "prefix-aware": prefix_aware,
}  # fmt: skip

"""Many replicas behind a router: each with its own scheduler, all on one virtual clock.

This needs an event heap: the next event is the end of a step of some replica, or an arrival, which the router sends to a
replica by the load at that moment. The cost of a simulation is that of the steps of all replicas.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet.routers import Asked, Replicas, Router
from scheduling.iteration import Plan
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate.costs import Cost, Host
from simulate.simulator import FRUITLESS, Run, asks_forever, waits_forever


@dataclass
class FleetRun(Run):
    """The run of a fleet: times, gaps and steps of all replicas, and the replica of each request."""

    where: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in a prefix cache."""
        prompts = sum(len(seq.prompt_ids) for seq in self.sequences)
        return sum(seq.cached for seq in self.sequences) / prompts if prompts else 0.0


class _FreePages(Many[float]):
    """The share of KV pages that are free at each replica, looked up when a router asks."""

    def __init__(self, schedulers: list[Scheduler]) -> None:
        self._schedulers = schedulers

    def __len__(self) -> int:
        return len(self._schedulers)

    def __getitem__(self, i: Any) -> Any:
        pages = self._schedulers[i].pages
        return pages.free / pages.total if pages is not None else 1.0


class Fleet:
    """The replicas, and what a router knows of them. Each has the cost and the host overheads of an engine of its own."""

    def __init__(self, schedulers: list[Scheduler], cost: Cost, host: Host | None = None) -> None:
        self.schedulers = schedulers
        self.cost = cost
        self.host = host or Host()
        n = len(schedulers)
        self.load = [0] * n
        self.known = Replicas([f"replica-{i}" for i in range(n)], self.load, _FreePages(schedulers))
        self.result = FleetRun(schedulers[0].policy.name, [], self.host)
        self._steps: dict[int, tuple[Plan, list[Output], float]] = {}  # what each computes now
        self._events: list[tuple[float, int, int]] = []  # (time, replica, step that ends or 0)
        self._idle_since = [0.0] * n
        self._looks_at = [-1.0] * n  # when it looks for the requests that found it idle
        self._fruitless = [0] * n
        for scheduler in schedulers:
            scheduler.record = False

    def run(self, arrivals: Iterable[Sequence], route: Router) -> FleetRun:
        """Serve all arrivals, each at the replica that `route` chooses."""
        result = self.result
        result.sequences = sorted(arrivals, key=lambda seq: seq.arrived_at)
        if result.sequences:
            result.began = result.sequences[0].arrived_at
        where = []
        for seq in result.sequences:
            seq.arrived_at += self.host.alpha0
            self._until(seq.arrived_at)
            self.schedulers[0].batch.pages.hash(seq)  # the same in every replica
            i = next(route(self.known, Asked(seq.hashes, seq.client)))
            where.append(i)
            was_empty = not self.schedulers[i].waiting
            if self.schedulers[i].add(seq):
                self.load[i] += 1
                self._wake(i, seq.arrived_at, was_empty)
        for i, scheduler in enumerate(self.schedulers):
            scheduler.drain()
            if scheduler.waiting:
                self._wake(i, result.sequences[-1].arrived_at, False)
        self._until(math.inf)
        for scheduler in self.schedulers:
            if not scheduler.is_idle:
                raise waits_forever(scheduler)
        result.where = np.array(where, dtype=int)
        return result

    def _wake(self, i: int, at: float, was_empty: bool) -> None:
        """Let an idle replica look at its queue at `at`, after all that arrives then, or when it polls next."""
        if i in self._steps or at <= self._looks_at[i]:
            return
        if self.host.poll and was_empty:
            since = self._idle_since[i]
            at = since + self.host.poll * math.ceil((at - since) / self.host.poll)
        self._looks_at[i] = at
        heapq.heappush(self._events, (at, i, 0))

    def _until(self, now: float) -> None:
        """Let everything happen that ends before `now`; what arrives at the end of a step is seen by the next."""
        while self._events and self._events[0][0] < now:
            at, i, number = heapq.heappop(self._events)
            if number:
                self._commit(i, at)
            elif i in self._steps:  # woken too late: a step began meanwhile
                continue
            self._turn(i, at)

    def _commit(self, i: int, at: float) -> None:
        """End the step of a replica and hand out its tokens."""
        plan, outputs, seconds = self._steps.pop(i)
        result = self.result
        for seq, output in zip(plan.sequences, outputs):
            if output is not None and seq.last_token_at is not None:
                result.gaps.append(at - seq.last_token_at)
        result.steps += 1
        result.busy += seconds
        result.ended = at
        self.load[i] -= len(self.schedulers[i].commit(plan, outputs, at).left)

    def _turn(self, i: int, now: float) -> None:
        """Begin the next step of a replica, or have it woken when its policy wants to be."""
        scheduler = self.schedulers[i]
        plan = scheduler.plan(now)
        if plan is None:
            self._idle_since[i] = now
            wake_at = scheduler.wake_at(now)
            if wake_at is not None and wake_at < math.inf:
                self._fruitless[i] += 1
                if self._fruitless[i] > FRUITLESS:
                    raise asks_forever(scheduler, now)
                heapq.heappush(self._events, (max(wake_at, math.nextafter(now, math.inf)), i, 0))
            return
        self._fruitless[i] = 0
        self.result.batches += bool(plan.joined)
        outputs: list[Output] = [0 if count == seq.pending else None for seq, count in zip(plan.sequences, plan.counts)]
        due = sum(1 for output in outputs if output is not None)
        seconds = self.cost(plan) + self.host.seconds(due)
        self._steps[i] = plan, outputs, seconds
        heapq.heappush(self._events, (now + seconds, i, plan.number))

"""Many replicas behind a router: each with its own scheduler, all on one virtual clock.

This needs an event heap: the next event is the end of a step of some replica, or an arrival, which the router sends to a
replica by the load at that moment. The cost of a simulation is that of the steps of all replicas.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduling.iteration import Plan
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate.costs import Cost, Host
from simulate.simulator import FRUITLESS, Run, asks_forever, waits_forever

Router = Callable[["Fleet", Sequence], int]


@dataclass
class FleetRun(Run):
    """The run of a fleet: times, gaps and steps of all replicas, and the replica of each request."""

    where: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in a prefix cache."""
        prompts = sum(len(seq.prompt_ids) for seq in self.sequences)
        return sum(seq.cached for seq in self.sequences) / prompts if prompts else 0.0


class Fleet:
    """The replicas, and what a router may use: the number of requests `load[i]` at replica i, and the generator `rng`.

    Each replica has the cost and the host overheads that a simulated engine has on its own.
    """

    def __init__(
        self, schedulers: list[Scheduler], cost: Cost, host: Host | None = None, rng: random.Random | None = None
    ) -> None:
        self.schedulers = schedulers
        self.cost = cost
        self.host = host or Host()
        self.rng = rng or random.Random(0)
        n = len(schedulers)
        self.load = [0] * n
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
            i = route(self, seq)
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


def round_robin() -> Router:
    """Each replica in turn."""
    turn = -1

    def route(fleet: Fleet, seq: Sequence) -> int:
        nonlocal turn
        turn = (turn + 1) % len(fleet.load)
        return turn

    return route


def random_split() -> Router:
    """A random replica, as many independent front ends choose."""
    return lambda fleet, seq: fleet.rng.randrange(len(fleet.load))


def least_loaded() -> Router:
    """The replica with the fewest requests; ties are broken at random."""

    def route(fleet: Fleet, seq: Sequence) -> int:
        least = min(fleet.load)
        start = fleet.rng.randrange(len(fleet.load))
        load = fleet.load
        return next(i % len(load) for i in range(start, start + len(load)) if load[i % len(load)] == least)

    return route


def power_of_two() -> Router:
    """The less loaded of two random replicas (Mitzenmacher, 2001)."""

    def route(fleet: Fleet, seq: Sequence) -> int:
        a, b = (fleet.rng.randrange(len(fleet.load)) for _ in range(2))
        return a if fleet.load[a] <= fleet.load[b] else b

    return route


def prefix_aware(slack: float = 2.0, page: int = 16) -> Router:
    """The replica that last received the longest part of this prompt, unless its load is `slack` times the mean plus 4.

    The router keeps its own map from the first pages of a prompt to a replica, so it queries no replica.
    """
    home: dict[tuple[int, int], int] = {}
    fallback = power_of_two()

    def route(fleet: Fleet, seq: Sequence) -> int:
        pages: list[tuple[int, int]] = []
        key = 0
        for k in range(len(seq.prompt_ids) // page):
            key = hash((key, *seq.prompt_ids[k * page : (k + 1) * page]))
            pages.append((k, key))
        replica = next((home[k] for k in reversed(pages) if k in home), None)
        mean = sum(fleet.load) / len(fleet.load)
        if replica is None or fleet.load[replica] > slack * mean + 4:
            replica = fallback(fleet, seq)
        for known in pages:
            home[known] = replica
        return replica

    return route


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin, "random": random_split, "least-loaded": least_loaded,
    "power-of-two": power_of_two, "prefix-aware": prefix_aware,
}  # fmt: skip
NEED_CACHE = {"prefix-aware"}
CHANCELESS = {"round-robin"}  # the others break ties, or choose, at random

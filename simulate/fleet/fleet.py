"""Many replicas behind a router: each with its own scheduler, all on one virtual clock.

This needs an event heap: the next event is the end of the steps of some replica, or an arrival, which the router sends to
a replica by the load at that moment. The cost of a simulation is that of the requests' joining and leaving.
"""

from __future__ import annotations

import collections.abc as abc
import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from costs.cost import Cost, Host
from routing.routers import Replicas, Router, RoutingKey
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.fleet.fleet_run import FleetRun
from simulate.fleet.replica import Replica
from simulate.simulator import waits_forever

Asks = Callable[[Sequence], RoutingKey]  # returns what a router knows of a request


class Pool:
    """The replicas that get new requests, and what their router knows of them."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.load: list[int] = []
        self.now = 0.0
        self.most = 0  # so many replicas have been in it at the same time
        self._known = Replicas([], self.load)

    def join(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self.most = max(self.most, len(self.replicas))
        self.load.append(len(replica.scheduler.waiting) + len(replica.scheduler.running))
        self._renumber()

    def leave(self, replica: Replica) -> None:
        self.load.pop(replica.place)
        self.replicas.pop(replica.place)
        replica.place = -1
        self._renumber()

    def _renumber(self) -> None:
        for place, replica in enumerate(self.replicas):
            replica.place = place
        self._known = Replicas([replica.name for replica in self.replicas], self.load, _FreePages(self))

    def choose(self, route: Router, seq: Sequence, now: float, asks: Asks | None = None) -> Replica:
        """Return the replica that gets a request; `asks` says what the router knows of it, by default its pages."""
        self.now = now
        if asks is None:
            self.replicas[0].scheduler.batch.pages.hash(seq)  # the same in every replica
        key = asks(seq) if asks else RoutingKey(seq.hashes, seq.client)
        return self.replicas[next(route(self._known, key))]


class _FreePages(abc.Sequence[float]):
    """The share of KV pages that are free at each replica, looked up when a router asks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pool.replicas)

    def __getitem__(self, i: Any) -> Any:
        replica = self._pool.replicas[i]
        replica.catch_up(self._pool.now)
        pages = replica.scheduler.pages
        return pages.free / pages.total if pages is not None else 1.0


class Fleet:
    """The replicas and the events. Each replica has the cost and the host overheads of an engine of its own.

    `gaps` says whether the times between tokens are kept, 8 bytes for each token. With `records`, the result has the Iteration
    of each step, in the order of their ends.
    """

    def __init__(
        self, schedulers: Iterable[Scheduler], cost: Cost, host: Host | None = None, *, gaps: bool = True,
        records: bool = False,
    ) -> None:  # fmt: skip
        self.host = host or Host()
        self.pool = Pool()
        self.replicas: list[Replica] = []  # all that there ever were
        self.over = False  # whether all requests have arrived
        self._cost = cost
        self._events: list[tuple[float, int, int]] = []  # (time, replica or -1, version of its end or 0, or call)
        self._calls: dict[int, Callable[[float], None]] = {}
        self._called = 0
        self._numbers: dict[Sequence, int] = {}  # of the requests inside, in order of arrival
        self.result = FleetRun("", [], self.host)
        self._gaps = self.result.gaps if gaps else None
        self._records = self.result.iterations if records else None
        for scheduler in schedulers:
            self.pool.join(self.start(scheduler, 0.0))

    def start(self, scheduler: Scheduler, now: float) -> Replica:
        """Return a new replica, which costs something from now on and gets no requests yet."""
        number = len(self.replicas)
        replica = Replica(number, scheduler, self._cost, self.host, self._gaps, self._records)
        replica.since = now
        self.replicas.append(replica)
        self.result.policy = scheduler.policy.name
        return replica

    def call(self, at: float, function: Callable[[float], None]) -> None:
        """Call a function at a time, before steps that end then."""
        self._called += 1
        self._calls[self._called] = function
        heapq.heappush(self._events, (at, -1, self._called))

    def run(self, arrivals: Iterable[Sequence], route: Router, asks: Asks | None = None) -> FleetRun:
        """Serve all arrivals, which are sorted by time, each at the replica that `route` chooses.

        `asks` says what the router knows of a request; without it, that is its pages and its client.
        """
        result, last = self.result, 0.0
        for seq in arrivals:
            if not result.requests:
                self.begin(seq.arrived_at)
            seq.arrived_at += self.host.alpha0
            last = seq.arrived_at
            self._until(last)
            self._numbers[seq] = result.requests
            replica = self.pool.choose(route, seq, last, asks)
            result.arrive(seq, replica.number)
            self.admit(self.pool, replica, seq)
        self.over = True
        self._drain(last)
        # A request that went on to another replica while they drained ended its draining, so all are told once more.
        self._drain(result.ended)
        for replica in self.replicas:
            if not replica.scheduler.is_idle:
                raise waits_forever(replica.scheduler)
        result.replicas = self.pool.most
        self._sum_up()
        return result

    def begin(self, now: float) -> None:
        """Take note of the first arrival."""
        self.result.began = now
        for replica in self.replicas:
            replica.since = now

    def admit(self, pool: Pool, replica: Replica, seq: Sequence) -> None:
        """Give a request to a replica of a pool."""
        was_empty = not replica.scheduler.waiting
        if replica.is_computing and replica.cut(seq.arrived_at):
            self._expect(replica)
        if replica.scheduler.add(seq):
            pool.load[replica.place] += 1
            self.wake(replica, seq.arrived_at, was_empty)
        else:
            del self._numbers[seq]

    def answer(self, replica: Replica, seq: Sequence) -> None:
        """Take note of a request that has left a replica."""
        number = self._numbers.pop(seq)
        if seq.finish_reason in ("length", "stop"):
            self.result.finish(number, seq)

    def wake(self, replica: Replica, at: float, was_empty: bool = False) -> None:
        """Let an idle replica look at its queue at `at`, after all that arrives then, or when it polls next."""
        looks_at = replica.looks_at(at, was_empty)
        if looks_at is not None:
            heapq.heappush(self._events, (looks_at, replica.number, 0))

    def _expect(self, replica: Replica) -> None:
        heapq.heappush(self._events, (replica.end, replica.number, replica.version))

    def _drain(self, now: float) -> None:
        """Let the replicas serve what is left, since nothing more arrives."""
        for replica in self.replicas:
            replica.scheduler.drain()
            if replica.scheduler.waiting:
                self.wake(replica, now)
        self._until(math.inf)

    def _until(self, now: float) -> None:
        """Let everything happen that ends before `now`; what arrives at the end of a step is seen by the next."""
        while self._events and self._events[0][0] < now:
            at, i, version = heapq.heappop(self._events)
            if i < 0:
                self._calls.pop(version)(at)
                continue
            replica = self.replicas[i]
            if version:
                # An arrival that cut a stretch short gave its end a new version; the event of the old end is void.
                if version != replica.version:
                    continue
                self._commit(replica, at)
            elif replica.is_computing:  # woken too late: a step began meanwhile
                continue
            self._turn(replica, at)

    def _commit(self, replica: Replica, at: float) -> None:
        """End the steps of a replica and take note of what was answered."""
        left = replica.commit()
        self.result.ended = at
        self._leave(replica, left)

    def _leave(self, replica: Replica, left: list[Sequence]) -> None:
        if left and replica.place >= 0:
            self._pool_of(replica).load[replica.place] -= len(left)
        for seq in left:
            self.answer(replica, seq)

    def _pool_of(self, replica: Replica) -> Pool:
        return self.pool

    def _turn(self, replica: Replica, now: float) -> None:
        """Begin the next steps of a replica, or have it woken when its policy wants to be."""
        began = replica.begin(now)
        self._leave(replica, replica.scheduler.refused)
        if began:
            self._expect(replica)
            return
        wakes_at = replica.wakes_at(now)
        if wakes_at is not None:
            heapq.heappush(self._events, (wakes_at, replica.number, 0))

    def _sum_up(self) -> None:
        result = self.result
        for replica in self.replicas:
            result.steps += replica.steps
            result.batches += replica.batches
            result.busy += replica.busy
            result.replica_seconds += max(0.0, min(replica.until, result.ended) - replica.since)

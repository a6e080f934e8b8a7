"""A fleet whose number of replicas follows its load: an autoscaler decides, and replicas take time to start.

A replica that is no longer wanted gets no new requests, finishes those that it has, and is gone. This module must not
know how an autoscaler decides, or how its result is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from costs.cost import Cost, Host
from routing.autoscalers import Autoscaler, Bounds, Patience
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.fleet.fleet import Fleet
from simulate.fleet.replica import Replica

INTERVAL = 1.0  # seconds between two decisions


class Scaling(NamedTuple):
    """How a fleet grows and shrinks; times in seconds."""

    autoscaler: Autoscaler
    bounds: Bounds
    startup: float  # from the decision until a replica takes requests
    up: float = 0.0  # for how long more, or fewer, must be wanted without a break
    down: float = 60.0


class ScaledFleet(Fleet):
    """A fleet that begins with the replicas that its autoscaler wants without any load, all of them ready."""

    def __init__(
        self, make: Callable[[], Scheduler], scaling: Scaling, cost: Cost, host: Host | None = None, **keeps: bool
    ) -> None:
        count = scaling.autoscaler([], scaling.bounds)
        super().__init__([make() for _ in range(count)], cost, host, **keeps)
        self._make = make
        self._scaling = scaling
        self._patience = Patience(scaling.up, scaling.down)
        self._starting: list[Replica] = []
        self._draining: list[Replica] = []

    def begin(self, now: float) -> None:
        super().begin(now)
        self._decide(now)

    def answer(self, replica: Replica, seq: Sequence) -> None:
        super().answer(replica, seq)
        if replica in self._draining:
            self._retire(replica, self.result.ended)

    def _decide(self, now: float) -> None:
        """Ask the autoscaler, and again after INTERVAL while there is something to serve."""
        replicas = [*self.pool.replicas, *self._starting]
        loads = [replica.load(now) for replica in replicas]
        wanted = self._scaling.autoscaler(loads, self._scaling.bounds)
        count = self._patience.decide(len(replicas), wanted, now)
        for _ in range(count - len(replicas)):
            replica = self.start(self._make(), now)
            self._starting.append(replica)
            self.call(now + self._scaling.startup, lambda at, replica=replica: self._open(replica, at))  # type: ignore[misc]
        for _ in range(len(replicas) - count):
            self._stop(now)
        self._note(now)
        if not self.over or any(not r.scheduler.is_idle for r in [*self.pool.replicas, *self._draining]):
            self.call(now + INTERVAL, self._decide)

    def _open(self, replica: Replica, now: float) -> None:
        """Let a replica that has started take requests, unless it was stopped meanwhile."""
        if replica in self._starting:
            self._starting.remove(replica)
            self.pool.join(replica)
            self._note(now)

    def _stop(self, now: float) -> None:
        """Stop the last replica that is starting, or else let the one with the fewest requests drain."""
        if self._starting:
            self._starting.pop().until = now
            return
        replica = min(reversed(self.pool.replicas), key=lambda replica: self.pool.load[replica.place])
        self.pool.leave(replica)
        self._draining.append(replica)
        replica.scheduler.drain()
        if replica.scheduler.waiting:
            self.wake(replica, now)
        self._retire(replica, now)

    def _retire(self, replica: Replica, now: float) -> None:
        """Let a draining replica go when it is idle."""
        if replica.scheduler.is_idle:
            self._draining.remove(replica)
            replica.until = now
            self._note(now)

    def _note(self, now: float) -> None:
        counts = (len(self.pool.replicas), len(self._starting), len(self._draining))
        history = self.result.history
        if not history or history[-1][1:] != counts:
            history.append((now, *counts))

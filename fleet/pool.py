"""What an ingress knows of its replicas: its own open requests, their last reports, and which of them rest.

It must not know how replicas are started or asked; clock and router are passed in.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from fleet.routers import Asked, Replicas, Router

REST_SECONDS = 1.0  # in which a replica that refused or broke a connection gets no request
KEPT = 4096  # changes of the number of open requests that are remembered between two reports


class Replica(NamedTuple):
    """A replica's lasting name and the address of its server."""

    name: str
    url: str


class Known:
    """One replica: the requests that this ingress has open there, and those that others have, by its last report.

    Reports lag. Of what a report counts, only what this ingress had not open itself is of others: the most that it had
    open between the question to the server and its answer.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.rests_until = 0.0
        self.kv_free = 1.0
        self.prefill_tokens = 0
        self._others = 0
        self._reported_at = 0.0
        self._times, self._counts = [0.0], [0]

    @property
    def open(self) -> int:
        """The requests that this ingress has open there."""
        return self._counts[-1]

    @property
    def load(self) -> int:
        return self.open + self._others

    def change(self, by: int, now: float) -> None:
        """Count a request that was opened or closed."""
        self._times.append(now)
        self._counts.append(self.open + by)
        if len(self._times) > KEPT:
            del self._times[: KEPT // 2], self._counts[: KEPT // 2]

    def report(self, report: Mapping[str, Any]) -> None:
        """Take what the replica said of itself, some time between `at` and `until`."""
        at = report.get("at", 0.0)
        if at <= self._reported_at:
            return
        self._reported_at = at
        then = max(0, bisect_right(self._times, at) - 1)
        own = max(self._counts[then : bisect_right(self._times, report.get("until", at))] or [self._counts[then]])
        self._others = max(0, int(report["running"]) + int(report["waiting"]) - own)
        del self._times[:then], self._counts[:then]
        self.kv_free = 1.0 - report["kv_used"]
        self.prefill_tokens = int(report["prefill_tokens"])


class Fleet(Protocol):
    """Where an ingress gets its replicas from."""

    pool: Pool

    async def choose(self, asked: Asked | None = None) -> list[Replica]:
        """Bring `pool.known` up to date; return the replicas that can take a request, the best first."""


class Pool:
    """The replicas as the router of this ingress sees them."""

    def __init__(self, route: Router, clock: Callable[[], float] = time.time) -> None:
        self._route, self._clock = route, clock
        self.known: dict[str, Known] = {}
        self._seen: dict[str, Known] = {}  # also those that have left, while they answer open requests
        self.retries = 0

    def update(self, replicas: Iterable[tuple[Replica, Mapping[str, Any]]]) -> None:
        """Note which replicas there are now, and the last report of each."""
        self.known = {}
        for replica, report in replicas:
            # One that has left and comes back still has its open requests, which would otherwise be counted below zero.
            one = self.known[replica.name] = self._seen.get(replica.name) or Known(replica)
            one.report(report)
        self._seen = {name: one for name, one in self._seen.items() if one.open} | self.known

    def order(self, asked: Asked) -> list[Replica]:
        """Return the replicas that do not rest, the best first."""
        now = self._clock()
        able = [one for one in self.known.values() if one.rests_until <= now]
        if not able:
            return []
        view = Replicas(
            [one.replica.name for one in able], [one.load for one in able], [one.kv_free for one in able],
            [one.prefill_tokens for one in able],
        )  # fmt: skip
        return [able[i].replica for i in self._route(view, asked)]

    def change(self, name: str, by: int) -> None:
        """Count a request that was opened at a replica or closed."""
        if name in self._seen:
            self._seen[name].change(by, self._clock())

    def rest(self, name: str) -> None:
        """Send a replica nothing for a moment, because it refused or broke a connection."""
        self.retries += 1
        if name in self.known:
            self.known[name].rests_until = self._clock() + REST_SECONDS

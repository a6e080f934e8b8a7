"""Engines that serve one queue, as the instances of a model in Triton do: an idle one takes the next batch.

There is no router, and all share one policy, whose memory belongs to the queue, not to a batch. Without records, the policy
must form closed batches, since an arrival does not end a stretch of equal steps. With its `preserve_ordering`, an answer
waits until all earlier requests have theirs; its engine does not wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from costs.cost import Cost, Host
from routing.routers import Router
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.fleet.fleet import Asks, Fleet, Pool
from simulate.fleet.fleet_run import FleetRun
from simulate.fleet.replica import Replica
from simulate.simulator import Run, simulate


class Instances(Fleet):
    """Engines with one queue."""

    def __init__(self, schedulers: Iterable[Scheduler], cost: Cost, host: Host | None = None, **keeps: bool) -> None:
        first = together(schedulers)
        super().__init__(first.sharing, cost, host, **keeps)
        self._ordered = getattr(first.policy, "preserve_ordering", False)
        self._done: dict[Sequence, bool] = {}  # for each request inside: whether it has its answer

    def run(self, arrivals: Iterable[Sequence], route: Router | None = None, asks: Asks | None = None) -> FleetRun:
        """Serve all arrivals, which are sorted by time."""
        return super().run(arrivals, lambda replicas, asked: iter((0,)), asks)

    def admit(self, pool: Pool, replica: Replica, seq: Sequence) -> None:
        """Put a request into the queue, and have the idle engines look at it."""
        was_empty = not replica.scheduler.waiting
        if not replica.scheduler.add(seq):
            del self._numbers[seq]
            return
        pool.load[0] += 1
        for replica in self.replicas:
            self.wake(replica, seq.arrived_at, was_empty)
        self._done[seq] = False

    def _leave(self, replica: Replica, left: list[Sequence]) -> None:
        """Answer the requests that have left, and then the later ones that waited for them."""
        self.pool.load[0] -= len(left)
        for seq in left:
            self.result.columns["replica"][self._numbers[seq]] = replica.number
            self._done[seq] = True
        answered = left
        if self._ordered:
            answered = list(itertools.takewhile(self._done.__getitem__, self._done))
        for seq in answered:
            if seq.finish_reason != "refused":
                seq.finished_at = self.result.ended
            del self._done[seq]
            self.answer(replica, seq)


def together(schedulers: Iterable[Scheduler]) -> Scheduler:
    """Let schedulers share the queue of the first, unless they do already; return that one."""
    first, *others = schedulers
    for other in others:
        if other not in first.sharing:
            other.share(first)
    return first


def serve(
    scheduler: Scheduler, arrivals: Iterable[Sequence], cost: Cost, host: Host | None = None, *, records: bool = False
) -> Run:
    """Serve all arrivals as `simulate` does, by all schedulers on this one's queue."""
    if len(scheduler.sharing) == 1:
        return simulate(scheduler, arrivals, cost, host, records=records)
    sequences = list(arrivals)
    run = Instances(scheduler.sharing, cost, host, records=True).run(sequences)
    run.sequences = sequences
    for number, record in enumerate(run.iterations, 1):
        record.n = number  # those of each engine are numbered from 1
    return run

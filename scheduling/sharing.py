"""The schedulers that serve one queue under one policy: what is done to all of them at once. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scheduling.policy import Policy
from scheduling.sequence import Sequence


class Sharing(list[Any]):
    """Schedulers, most often one alone; `errors` are those of their hooks that only take note, unless it `raises` them."""

    def __init__(self, first: Any) -> None:
        super().__init__([first])
        self.raises = True
        self.errors: list[BaseException] = []

    def keep(self, error: BaseException) -> None:
        """Keep the error of a hook that only takes note, or raise it."""
        if self.raises:
            raise error
        self.errors.append(error)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences of all."""
        return [seq for one in self for seq in one.running]

    def slots(self, most: int) -> int:
        """Return the total number of slots if each scheduler has at most `most`."""
        return sum(len(one.batch.numbers[:most]) for one in self)

    def use(self, policy: Policy) -> None:
        """Make `policy` the active one."""
        for one in self:
            one.use(policy)

    def drop(self, one: Any) -> None:
        """End `Scheduler.share`; nothing may be running."""
        one.backlog.batches.remove(one.batch)
        self.remove(one)

    def switch(self, policy: Policy, now: float) -> list[Sequence]:
        """Do what `Scheduler.switch` says, once the time that has passed is charged."""
        first = self[0]
        before, expiries = first.policy, first.queue.expiries.copy()
        policy.draining = before.draining
        try:
            self.use(policy)
            for seq in self.running:
                policy.on_admit(seq, now)
            first.queue.expiries.clear()
            for seq in first.waiting:
                first.arrive(seq)
            done = [[seq for seq in policy.release(one.running) if seq.is_finished] for one in self]
            return [seq for one, some in zip(self, done) for seq in one.leave(some, now)]
        except BaseException:
            self.use(before)
            first.queue.expiries[:] = expiries
            raise

    def let_go(self, now: float) -> list[Sequence]:
        """Release the sequences that the policy lets go."""
        return [seq for one in self for seq in one.let_go(now)]

    def vacate(self, leaving: Collection[Sequence]) -> None:
        """Free the slots of running sequences, each where it runs."""
        for one in self:
            own = set(one.running)
            one.vacate([seq for seq in leaving if seq in own])

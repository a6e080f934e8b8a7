"""The schedulers that serve one queue under one policy: what is done to all of them at once. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from scheduling.advance import Errors
from scheduling.policy import Policy
from scheduling.sequence import Sequence


class Sharing(list[Any]):
    """Schedulers, most often one alone; `errors` are those of their hooks, where they are kept."""

    errors: Errors = None

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

    def let_go(self, now: float) -> list[Sequence]:
        """Release the sequences that the policy lets go."""
        return [seq for one in self for seq in one.let_go(now)]

    def vacate(self, leaving: Collection[Sequence]) -> None:
        """Free the slots of running sequences, each where it runs."""
        for one in self:
            own = set(one.running)
            one.vacate([seq for seq in leaving if seq in own])

"""A drafter whose failure ends speculation and nothing else: no request needs draft tokens."""

from __future__ import annotations

import logging
from typing import TypeVar

from scheduling.sequence import Sequence
from scheduling.speculation import Drafter, Offer

log = logging.getLogger(__name__)

T = TypeVar("T")


class GuardedDrafter:
    """The drafts of `drafter` until it fails, none after that."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.spent = 0.0
        self.has_failed = False

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`."""
        if self.has_failed:
            return []
        try:
            return self.drafter.survey(sequences)
        except Exception:
            return self._give_up([])

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        try:
            drafts = self.drafter.propose(sequences, counts)
        except Exception:
            return self._give_up([[] for _ in sequences])
        self.spent = self.drafter.spent
        return drafts

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`."""
        return self.drafter.seconds(sequences)

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        try:
            self.drafter.forget(seq)
        except Exception:
            self._give_up(None)

    def _give_up(self, nothing: T) -> T:
        if not self.has_failed:
            log.exception("the drafter failed; from here on tokens are computed one by one, until the next start")
        self.has_failed = True
        self.spent = 0.0
        return nothing

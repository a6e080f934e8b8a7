"""A drafter whose failure ends speculation and nothing else: no request needs draft tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
        return [] if self.has_failed else self._try([], self.drafter.survey, sequences)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        nothing: list[list[int]] = [[] for _ in sequences]
        drafts = self._try(nothing, self.drafter.propose, sequences, counts)
        self.spent = 0.0 if self.has_failed else self.drafter.spent
        return drafts

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`."""
        return self.drafter.seconds(sequences)

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        self._try(None, self.drafter.forget, seq)

    def _try(self, nothing: T, call: Callable[..., T], *values: object) -> T:
        """Return what the drafter does, or nothing if it fails."""
        try:
            return call(*values)
        except Exception:
            if not self.has_failed:
                log.exception("the drafter failed; from here on tokens are computed one by one, until the next start")
            self.has_failed = True
            return nothing

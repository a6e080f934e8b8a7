"""A drafter for checks, whose right and wrong draft tokens are chosen beforehand. It must not know laws or costs."""

from __future__ import annotations

from collections.abc import Callable

from scheduling.sequence import Sequence
from scheduling.speculation import MOST, Offer


class ScriptedDrafter:
    """Proposes the tokens that sequences are going to get, except that each `every`-th of a text is wrong.

    `token` returns the token of a sequence at a place of its answer.
    """

    spent = 0.0

    def __init__(self, token: Callable[[Sequence, int], int], every: int) -> None:
        self._token = token
        self._every = every

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`."""
        return [Offer(i, MOST, i % 2) for i, seq in enumerate(sequences) if seq.output_ids]

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        return [
            [self._draft(seq, place) for place in range(len(seq.output_ids), len(seq.output_ids) + count)]
            for seq, count in zip(sequences, counts)
        ]

    def _draft(self, seq: Sequence, place: int) -> int:
        token = self._token(seq, place)
        return token if (seq.length + place) % self._every else token + 1

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`."""
        return 0.0

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""

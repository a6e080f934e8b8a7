"""A drafter for checks, whose right and wrong draft tokens are chosen beforehand. It must not know laws or costs."""

from __future__ import annotations

from costs.drafting import KnownDrafter, Tokens
from scheduling.sequence import Sequence
from scheduling.speculation import MOST, Offer


class ScriptedDrafter(KnownDrafter):
    """Proposes the tokens that sequences are going to get, except that each `every`-th of a text is wrong.

    `token` returns the token of a sequence at a place of its answer.
    """

    def __init__(self, token: Tokens, every: int) -> None:
        super().__init__(lambda seq, later: token(seq, len(seq.output_ids) + later))
        self._every = every

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`."""
        return [Offer(i, MOST, i % 2) for i, seq in enumerate(sequences) if seq.output_ids]

    def accepts(self, seq: Sequence, place: int) -> bool:
        return (seq.length + place) % self._every > 0

"""Propose the tokens that the form of an answer forces, before those of another drafter: they are right nearly always."""

from __future__ import annotations

from scheduling.sequence import Sequence
from scheduling.speculation import Drafter, Offer

KIND = -1  # of these drafts; no other drafter has it


class ForcedDrafter:
    """What `Constraint.forced` finds for sequences that have a form, and the drafts of `other` for all that have none."""

    def __init__(self, other: Drafter) -> None:
        self.other = other
        self.spent = 0.0
        self._forced: dict[Sequence, list[int]] = {}  # of this step

    def survey(self, sequences: list[Sequence]) -> list[Offer]:
        """See `Drafter.survey`."""
        self._forced.clear()
        offers = self.other.survey(sequences)
        forced = []
        for place, seq in enumerate(sequences):
            form = getattr(seq.sampling, "grammar", None)
            if form is not None and (tokens := form.forced(seq.output_ids)):
                self._forced[seq] = tokens
                forced.append(Offer(place, len(tokens), KIND))
        return sorted([*forced, *(offer for offer in offers if sequences[offer.place] not in self._forced)])

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        free = [(seq, count) for seq, count in zip(sequences, counts) if seq not in self._forced]
        self.spent = 0.0
        drafts = iter(self.other.propose([seq for seq, _ in free], [count for _, count in free]) if free else [])
        if free:
            self.spent = self.other.spent
        return [self._forced[s][:n] if s in self._forced else next(drafts) for s, n in zip(sequences, counts)]

    def seconds(self, sequences: int) -> float:
        """See `Drafter.seconds`."""
        return self.other.seconds(sequences)

    def forget(self, seq: Sequence) -> None:
        """See `Drafter.forget`."""
        self._forced.pop(seq, None)
        self.other.forget(seq)

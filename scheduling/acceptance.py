"""How likely a draft is right: a running estimate for each sequence, drawn towards that of all. Pure."""

from __future__ import annotations

from scheduling.sequence import Sequence

FADING = 0.95  # of what was seen, with each draft that is judged: about the last 20 count
PRIOR = 4.0  # drafts that the estimate of all counts for in that of one sequence
START = (2.0, 1.2)  # drafts that were judged, and right, of a kind of which none was


class Acceptance:
    """Estimates by the kind of the drafts, each of which judged drafts move."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[float, float]] = {}
        self._own: dict[Sequence, dict[int, tuple[float, float]]] = {}
        self._judged_at: dict[Sequence, int] = {}
        self._clock = 0

    def chance(self, seq: Sequence, kind: int) -> float:
        """Return how likely the next draft of this kind is right, between 0 and 1."""
        judged, right = self._all.get(kind, START)
        general = right / judged
        own = self._own.get(seq)
        if own is None or kind not in own:
            return general
        judged, right = own[kind]
        return (right + PRIOR * general) / (judged + PRIOR)

    def judge(self, seq: Sequence, kind: int, drafts: int, right: int) -> None:
        """Note that of some drafts for a sequence the first `right` ones were right; those behind the next are unknown."""
        judged = right + (right < drafts)
        own = self._own.setdefault(seq, {})
        own[kind] = _faded(own.get(kind, (0.0, 0.0)), judged, right)
        self._all[kind] = _faded(self._all.get(kind, START), judged, right)
        self._clock += 1
        self._judged_at[seq] = self._clock

    def least_recent(self, sequences: list[Sequence]) -> int:
        """Return the index of the sequence that was judged longest ago."""
        return min(range(len(sequences)), key=lambda i: self._judged_at.get(sequences[i], 0))

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._own.pop(seq, None)
        self._judged_at.pop(seq, None)


def _faded(before: tuple[float, float], judged: int, right: int) -> tuple[float, float]:
    keep = FADING**judged
    return before[0] * keep + judged, before[1] * keep + right

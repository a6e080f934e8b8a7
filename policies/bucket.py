"""Static batches of prompts of like length: the batch with the least padding that the oldest can be in.

When there are more than fit, those who wait are looked at in the order of their prompts' lengths; of all runs of
`max_batch_size` neighbours that contain the first in order, the one is taken that pads least. So nobody starves, and a
long prompt finds long company (length buckets, as in tf.data and fairseq).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import count

from policies import static
from scheduling.policy import Room
from scheduling.sequence import Sequence

Entry = tuple[int, int, Sequence]  # prompt length, number


class Policy(static.Policy):
    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self._numbers = count()
        self._entries: dict[Sequence, Entry] = {}
        self._sorted: list[Entry] = []

    def admit(
        self, waiting: Collection[Sequence], running: list[Sequence], room: Room, now: float
    ) -> int:
        return 0 if running else min(len(waiting), room.slots)

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        first = next(iter(super().order(waiting, now)))
        place = bisect_left(self._sorted, self._entries[first])
        size = self.max_batch_size
        starts = range(max(0, place - size + 1), max(0, min(place, len(self._sorted) - size)) + 1)
        start = min(starts, key=self._padding)
        batch = [seq for _, _, seq in self._sorted[start : start + size]]
        return [first, *(seq for seq in batch if seq is not first)]

    def _padding(self, start: int) -> int:
        batch = self._sorted[start : start + self.max_batch_size]
        return batch[-1][0] * len(batch) - sum(length for length, _, _ in batch)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._put(seq)

    def on_displace(self, seq: Sequence, now: float) -> None:
        super().on_displace(seq, now)
        self._put(seq)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._drop(seq)

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        self._drop(seq)

    def _put(self, seq: Sequence) -> None:
        entry = self._entries[seq] = (seq.pending, next(self._numbers), seq)
        insort(self._sorted, entry)

    def _drop(self, seq: Sequence) -> None:
        entry = self._entries.pop(seq, None)
        if entry is not None:
            del self._sorted[bisect_left(self._sorted, entry)]

"""Static batches of prompts of similar length: the batch with the least padding that contains the oldest request.

Waiting requests are sorted by the lengths of their prompts. Of all runs of `max_batch_size` neighbors that contain the
first in order, the one with the least padding is taken. So no request starves, and a long prompt finds other long ones
(length buckets, as in tf.data and fairseq).
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import count

from policies import static
from scheduling.policy import Budget
from scheduling.sequence import Sequence

Entry = tuple[int, int, Sequence]  # prompt length, number


class Policy(static.Policy):
    def __init__(self) -> None:
        self.claims = self.claims.without_order()
        self._count = count()
        self._filed: dict[Sequence, Entry] = {}
        self._by_length: list[Entry] = []

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        return 0 if running else min(len(waiting), budget.slots)

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        first = next(iter(super().order(waiting, now)))
        place = bisect_left(self._by_length, self._filed[first])
        size = self.max_batch_size
        starts = range(max(0, place - size + 1), max(0, min(place, len(self._by_length) - size)) + 1)
        start = min(starts, key=self._padding)
        batch = [seq for _, _, seq in self._by_length[start : start + size]]
        return [first, *(seq for seq in batch if seq is not first)]

    def _padding(self, start: int) -> int:
        batch = self._by_length[start : start + self.max_batch_size]
        return batch[-1][0] * len(batch) - sum(length for length, _, _ in batch)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._file(seq)

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._file(seq)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._unfile(seq)

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        self._unfile(seq)

    def _file(self, seq: Sequence) -> None:
        entry = self._filed[seq] = (seq.pending, next(self._count), seq)
        insort(self._by_length, entry)

    def _unfile(self, seq: Sequence) -> None:
        entry = self._filed.pop(seq, None)
        if entry is not None:
            del self._by_length[bisect_left(self._by_length, entry)]

"""Orders by a key that a sequence gets when it arrives: a sorted list, so that no step searches the queue."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import merge
from itertools import count, islice, takewhile

from scheduling import policy
from scheduling.sequence import Sequence

Entry = tuple[float, int, Sequence]  # key and number of arrival, both negated: the first in order is the last here


class Sorted(policy.Policy):
    """Least key first, then by arrival; a request that `is_overdue` goes before all others."""

    def __init__(self) -> None:
        # In a closed loop, no request could join in the place of a preempted one.
        self.preempts = not self.closed
        self._numbers = count()
        self._entries: dict[Sequence, Entry] = {}
        self._sorted: list[Entry] = []

    def key(self, seq: Sequence, now: float) -> float:
        """Return the key of a sequence; called once, when it begins to wait."""
        raise NotImplementedError

    def is_overdue(self, seq: Sequence, now: float) -> bool:
        """Return whether the oldest request goes first, whatever its key."""
        return False

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return self._ordered(waiting, self._sorted, now)

    def _ordered(self, waiting: Collection[Sequence], entries: list[Entry], now: float) -> Iterator[Sequence]:
        overdue: dict[Sequence, None] = {}
        for seq in _by_arrival(waiting):
            if not self.is_overdue(seq, now):
                break
            overdue[seq] = None
            yield seq
        for seq in self._by_key(entries):
            if seq not in overdue:
                yield seq

    def _list_of(self, seq: Sequence) -> list[Entry]:
        """Return the list in which a sequence waits."""
        return self._sorted

    def _by_key(self, entries: list[Entry]) -> Iterator[Sequence]:
        passed = 0  # entries at the end that were yielded and did not join
        while passed < len(entries):
            entry = entries[-1 - passed]
            yield entry[2]
            if passed < len(entries) and entries[-1 - passed] is entry:
                passed += 1

    def _outranked(self, running: list[Sequence], key: Callable[[Sequence], float]) -> list[Sequence]:
        """Return the requests that are preempted for the first in order, each for one with a lower key, the highest first."""
        out = []
        for seq, better in zip(sorted(running, key=key, reverse=True), self._by_key(self._sorted)):
            if key(better) >= key(seq):
                break
            out.append(seq)
        return out

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._put(seq, now)

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._put(seq, now)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._drop(seq)

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        self._drop(seq)

    def _put(self, seq: Sequence, now: float) -> None:
        entry = self._entries[seq] = (-self.key(seq, now), -next(self._numbers), seq)
        insort(self._list_of(seq), entry)

    def _drop(self, seq: Sequence) -> None:
        entry = self._entries.pop(seq, None)
        if entry is not None:
            entries = self._list_of(seq)
            del entries[bisect_left(entries, entry)]


def _by_arrival(waiting: Collection[Sequence]) -> Iterator[Sequence]:
    """Return the waiting requests, the first to arrive first; the queue has those that were preempted before all."""
    preempted = sorted(takewhile(lambda seq: seq.preemptions, waiting), key=_arrival)
    return merge(preempted, islice(waiting, len(preempted), None), key=_arrival)


def _arrival(seq: Sequence) -> float:
    return seq.arrived_at

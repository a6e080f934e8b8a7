"""Multi-bin batching: static batches of requests with similar predicted lengths (arXiv 2412.04504).

Arrivals go into k bins of equal mass by predicted length, first in, first out. A bin with `max_batch_size` waiting
requests gives a batch; batches are served in the order in which they became full. At low load, a bin whose oldest
request has waited for `flush` seconds gives what it has. The bounds of the bins are the quantiles of the predictions so
far, unless they are set. With continuous batching it is useless, since no request waits for the longest.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable

from policies import static
from policies.orders._predictions import Predicting
from scheduling.options import LONGEST_WAIT, option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

SEEN = 1000  # predictions that the quantiles are taken from


class Policy(Predicting, static.Policy):
    k = option(4, "bins", low=1, high=64)
    bounds: tuple[int, ...] = option((), "longest prediction of each bin except the last", low=1)
    flush = option(
        1.0, "maximum seconds that the oldest request of a bin waits for a full batch", low=0.0, high=LONGEST_WAIT
    )

    def __init__(self) -> None:
        self.claims = self.claims.without_order().but(patience=self.flush, uses=self.heeded)
        self.k = len(self.bounds) + 1 if self.bounds else self.k
        self._bins: list[list[Sequence]] = [[] for _ in range(self.k)]
        self._batches: deque[list[Sequence]] = deque()
        self._latest: deque[float] = deque()
        self._quantiles: list[float] = []

    def _bin_of(self, length: float) -> int:
        if self.bounds:
            return bisect_left(sorted(self.bounds), length)
        if len(self._latest) == SEEN:
            del self._quantiles[bisect_left(self._quantiles, self._latest.popleft())]
        self._latest.append(length)
        insort(self._quantiles, length)
        return bisect_left(self._quantiles, length) * self.k // len(self._quantiles)

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._into_bin(seq)

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._into_bin(seq)

    def _into_bin(self, seq: Sequence) -> None:
        members = self._bins[self._bin_of(self.predict(seq))]
        members.append(seq)
        if len(members) == self.max_batch_size:
            self._batches.append(members[:])
            members.clear()

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if running:
            return 0
        for members in self._bins:
            if members and (self.draining or now >= members[0].arrived_at + self.flush):
                self._batches.append(members[:])
                members.clear()
        while self._batches:
            self._batches[0] = [seq for seq in self._batches[0] if seq.state == "waiting"]
            if self._batches[0]:
                return min(len(self._batches[0]), budget.slots)
            self._batches.popleft()
        return 0

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return list(self._batches[0])

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        return min(m[0].arrived_at for m in self._bins if m) + self.flush if any(self._bins) else None

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        for members in self._bins:
            if seq in members:
                members.remove(seq)

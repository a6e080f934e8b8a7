"""Gittins index by program: the program most likely to end soon goes first, judging by those that have ended.

For a program that has received a, the index is the largest ratio, over all b > a, of the programs that ended between a and b
to the work that all beyond a took until b (Gittins 1979; best for the mean of an M/G/1 queue without tools). If few programs
are long, this is like `plas`. Until `least` programs have ended, calls are served in order of arrival.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

from policies.orders._programs import Programs
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Programs):
    idle = option(60.0, "seconds without a call after which a program counts as ended", low=0.0)
    least = option(20, "ended programs that the order needs; with fewer, calls go in order of arrival", low=1)

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=512)  # what programs had received when they ended
        self._totals: list[float] = []  # the same, in ascending order

    def key(self, seq: Sequence, now: float) -> float:
        return -self.index(super().key(seq, now)) if len(self._totals) >= self.least else 0.0

    def index(self, received: float) -> float:
        """Return the Gittins index of a program that has received this much, 0 if no ended program received more."""
        beyond = self._totals[bisect_right(self._totals, received) :]
        best = spent = 0.0
        for ended, total in enumerate(beyond):
            spent += (total - received) * (len(beyond) - ended)
            best, received = max(best, (ended + 1) / spent), total
        return best

    def on_arrival(self, seq: Sequence, now: float) -> None:
        running: set[Hashable] = set()
        while self.accounts and now - next(iter(self.accounts.values()))[1] > self.idle:
            name, (received, _) = self.accounts.popitem(last=False)
            running = running or set(map(self.holder, self._before))
            if name in running:  # a call of it is open: look again after a while
                self.accounts[name] = received, now
            else:
                self._samples.append(received)
                self._totals = sorted(self._samples)
        super().on_arrival(seq, now)

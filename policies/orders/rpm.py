"""A limit on requests per client and minute: at most `limit` are accepted in any 60 s; the others are refused.

Accepted requests are served first come, first served. It is the simplest protection against a greedy client, and it
refuses work even when the engine is idle.
"""

from collections import OrderedDict, deque

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    limit = option(60, "maximum requests per client and period", low=1, high=100_000)
    period = option(60.0, "length of the period in seconds", low=0.001, high=86_400.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("client",), refuses=True)
        self._accepted: OrderedDict[str, deque[float]] = OrderedDict()  # the last accepted last

    def refuse(self, seq: Sequence, now: float) -> bool:
        recent = self._accepted.get(seq.client)
        return recent is not None and len(recent) == self.limit and recent[0] > now - self.period

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        if seq.preemptions:  # it counted when it came
            return
        recent = self._accepted.setdefault(seq.client, deque(maxlen=self.limit))
        recent.append(now)
        self._accepted.move_to_end(seq.client)
        while self._accepted and next(iter(self._accepted.values()))[-1] <= now - self.period:
            self._accepted.popitem(last=False)

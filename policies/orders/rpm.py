"""A limit on requests per minute and client: at most `limit` are accepted in any 60 s, the rest is refused.

First come, first served among those who are accepted. What services do who do not want to think about fairness; it
turns work away when there is room for it.
"""

from __future__ import annotations

from collections import deque

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    limit = option(60, "requests that a client may send", low=1)
    period = option(60.0, "seconds in which it may", low=0.0)

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self._accepted: dict[str, deque[float]] = {}

    def refuse(self, seq: Sequence, now: float) -> bool:
        recent = self._accepted.setdefault(seq.client, deque())
        while recent and recent[0] <= now - self.period:
            recent.popleft()
        return len(recent) >= self.limit

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._accepted.setdefault(seq.client, deque()).append(now)

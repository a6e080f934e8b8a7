"""Static batches of exactly k: no batch starts until k requests wait (bulk service with a fixed batch).

A server must not keep the last ones forever: after the oldest has waited for `flush` seconds, or when no more requests
will arrive, the waiting ones form a batch. The engine has k slots, or fewer if `max_batch_size` is smaller.
"""

from collections.abc import Collection

from policies import static
from scheduling.options import LONGEST_WAIT, option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(static.Policy):
    k = option(8, "requests per batch", low=1)
    flush = option(1.0, "maximum seconds that the oldest request waits for a full batch", low=0.0, high=LONGEST_WAIT)

    def __init__(self) -> None:
        self.k = self.max_batch_size = min(self.k, self.max_batch_size)
        self.claims = self.claims.but(patience=self.flush)

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if running:
            return 0
        if len(waiting) >= self.k or self.draining or now >= self._flush_at(waiting):
            return min(len(waiting), self.k)
        return 0

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        return self._flush_at(waiting)

    def _flush_at(self, waiting: Collection[Sequence]) -> float:
        return next(iter(waiting)).arrived_at + self.flush

"""Static batches that all run to the longest of the whole collection: Anyscale's naive baseline (2023).

First it collects requests until no more will arrive, `n` wait, or the oldest has waited for `flush` seconds. Then it
runs batches of `max_batch_size`, each decoded to the largest number of tokens in the collection. It reproduces a
published number and is not meant for use.
"""

from collections.abc import Collection, Iterable
from math import inf

from policies import static
from scheduling.iteration import Plan
from scheduling.options import LONGEST_WAIT, option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(static.Policy):
    n = option(0, "requests to collect; 0: as many as arrive", low=0)
    flush = option(1.0, "maximum seconds that the oldest request waits for the rest", low=0.0, high=LONGEST_WAIT)

    def __init__(self) -> None:
        claims, in_order = self.claims.without_order(), type(self).order is Policy.order and not self.order_name
        most = 0 if in_order else inf
        self.claims = claims.but(patience=self.flush, overruns=True, overtaking_tokens=most)
        self._collected: dict[Sequence, None] = {}
        self._longest = 0  # tokens of the longest of the collection
        self._steps = 0  # of the current batch

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if running:
            return 0
        if not self._collected and self._is_complete(waiting, now):
            self._collected = dict.fromkeys(super().order(waiting, now))
            self._longest = max(seq.max_tokens for seq in waiting)
        self._steps = 0
        return min(len(self._collected), budget.slots)

    def _is_complete(self, waiting: Collection[Sequence], now: float) -> bool:
        enough = bool(self.n) and len(waiting) >= self.n
        return enough or self.draining or now >= next(iter(waiting)).arrived_at + self.flush

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return list(self._collected)

    def release(self, running: list[Sequence]) -> list[Sequence]:
        return super().release(running) if self._steps >= self._longest else []

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        return next(iter(waiting)).arrived_at + self.flush

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._collected.pop(seq, None)

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        self._steps += 1

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        self._collected.pop(seq, None)

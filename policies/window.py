"""Triton's dynamic batching: an idle engine waits a little for more requests, and prefers certain batch sizes.

With n waiting, it starts: as many as there are slots if n is enough; else the largest preferred size that n reaches;
else all n once the oldest has waited for `delay`. The batch runs as under `static`. Without a delay and preferred sizes
it is `static` (NVIDIA Triton, "dynamic batcher": preferred_batch_size, max_queue_delay_microseconds).
"""

from collections.abc import Collection

from policies import static
from scheduling.options import LONGEST_WAIT, option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(static.Policy):
    delay = option(
        0.0,
        "maximum seconds that the oldest request waits for others, usually 0.005 to 0.1",
        low=0.0,
        high=LONGEST_WAIT,
    )
    preferred: tuple[int, ...] = option((), "batch sizes that start at once, such as 4,8", low=1)

    def __init__(self) -> None:
        self.claims = self.claims.but(patience=self.delay)

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if running:
            return 0
        n = len(waiting)
        if n >= self.max_batch_size:
            return self.max_batch_size
        sizes = [size for size in self.preferred if size <= n]
        if sizes:
            return max(sizes)
        return n if now >= self._latest(waiting) else 0

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        return self._latest(waiting)

    def _latest(self, waiting: Collection[Sequence]) -> float:
        return next(iter(waiting)).arrived_at + self.delay

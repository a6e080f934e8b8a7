"""Shortest job first: the request with the fewest predicted tokens, so that few requests wait for a long one.

It is best for the mean latency of one server with known lengths (Phipps 1956). So that no long request starves, the
oldest goes first once it has waited for more than `guard` seconds, or for more than `guard_ratio` times its predicted
time, at the seconds per token of finished requests. No predictor saves more of the mean wait in a burst than the Gini
coefficient of the lengths.
"""

from policies.orders._predictions import Predicting
from policies.orders._sorted import Sorted
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Predicting, Sorted):
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)
    guard_ratio = option(10.0, "multiple of its predicted time after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(guard=self.guard, overtaking_tokens=0)
        self._served, self._tokens = 0.0, 0  # seconds and tokens of finished requests

    def key(self, seq: Sequence, now: float) -> float:
        return self.predict(seq)

    def is_overdue(self, seq: Sequence, now: float) -> bool:
        limit = self.guard
        if self._tokens:
            pace = self._served / self._tokens
            limit = min(limit, self.guard_ratio * pace * self.predict(seq))
        return now - seq.arrived_at > limit

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        if seq.scheduled_at is not None and seq.output_ids:
            self._served += now - seq.scheduled_at
            self._tokens += len(seq.output_ids)

"""Earliest deadline first (Liu and Layland 1973): by the time at which the whole answer is needed.

A request without a deadline gets `slo` seconds, and `slo_per_token` for each requested token.
"""

from policies.orders._sorted import Sorted
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Sorted):
    slo = option(10.0, "deadline in seconds for requests that set none", low=0.0)
    slo_per_token = option(0.0, "additional seconds per token", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("deadline", "length") if self.slo_per_token else ("deadline",))

    def key(self, seq: Sequence, now: float) -> float:
        if seq.deadline is not None:
            return seq.deadline
        return seq.arrived_at + self.slo + self.slo_per_token * seq.max_tokens

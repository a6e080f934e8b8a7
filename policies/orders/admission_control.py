"""Admission control: first come, first served; requests that would miss their deadlines are refused on arrival.

A new request is refused if the work before it and its own end after its deadline (`scheduling/backlog.py`): served late, it
would only make others late (Clockwork, OSDI 2020; early rejection in Mooncake, FAST 2025). Until the time of steps is known,
and while draft tokens are computed, nothing is refused.
"""

from math import inf

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    estimates = True
    slo = option(0.0, "deadline in seconds for requests that set none; 0: these are never refused", low=0.0)
    slack = option(0.0, "seconds by which an admitted request may be expected to miss its deadline; negative: to spare")

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("deadline",), refuses=True, refuses_only_late=self.slack >= 0)

    def refuse(self, seq: Sequence, now: float) -> bool:
        due = seq.deadline if seq.deadline is not None else now + (self.slo or inf)
        is_late = seq.estimate is not None and seq.estimate.ends_at > due + self.slack
        return is_late or super().refuse(seq, now)

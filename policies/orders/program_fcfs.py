"""First come, first served by program (Continuum, arXiv 2511.02230): the program whose first call came first."""

from policies.orders._programs import Programs
from scheduling.sequence import Sequence


class Order(Programs):
    w_p = w_q = 0.0  # an account is when the program began, and nothing is charged

    def opening(self, seq: Sequence) -> float:
        return seq.arrived_at

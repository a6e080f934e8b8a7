"""Program-level attained service (Autellix, arXiv 2502.13965): the program that has received the least service goes first.

It shortens the mean where few programs are long and calls follow one another, and lengthens it where all programs
are alike. Calls of a program that run together do not see one another: the service of each counts when it ends.
"""

from math import frexp

from policies.orders._programs import Programs
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Programs):
    quantum = option(64.0, "service of the first level; each is twice as long as the one before, 0: no levels", low=0.0)

    def key(self, seq: Sequence, now: float) -> float:
        received = super().key(seq, now)
        return frexp(max(1.0, received / self.quantum) / 2)[1] if self.quantum else received

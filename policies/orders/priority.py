"""By priority, the lower number first (Triton: 1 is the highest), first come, first served within one level.

With `aging`, a request rises by one level each time it has waited for that many seconds, so that none starves.
"""

from policies.orders._sorted import Sorted
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(Sorted):
    aging = option(0.0, "seconds of waiting that raise a request by one level; 0: never", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("priority",))

    def key(self, seq: Sequence, now: float) -> float:
        """Return the level; all requests age equally, so the time of arrival is added once."""
        return seq.priority + (seq.arrived_at / self.aging if self.aging else 0.0)

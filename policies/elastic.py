"""Static batching whose members leave when they are done; arrivals still wait until the whole batch has left.

A finished member is answered at once and costs nothing any more; prompts are padded as in `static`. The difference
between `static` and this policy is the price of holding rows, that between this and `dynamic` the price of joining
late.
"""

from policies import static
from scheduling.sequence import Sequence


class Policy(static.Policy):
    def __init__(self) -> None:
        self.claims = self.claims.but(holds=False)

    def release(self, running: list[Sequence]) -> list[Sequence]:
        return [seq for seq in running if seq.is_finished]

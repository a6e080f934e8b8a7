"""Static batching whose members leave when they are done: late arrivals still wait until everybody has left.

Who has all its tokens is answered at once and stops costing; prompts are padded as in `static`. What is between
`static` and this is the price of holding rows, what is between this and `dynamic` that of joining late.
"""

from __future__ import annotations

from policies import static
from scheduling.sequence import Sequence


class Policy(static.Policy):
    holds = False

    def release(self, running: list[Sequence]) -> list[Sequence]:
        return [seq for seq in running if seq.is_finished]

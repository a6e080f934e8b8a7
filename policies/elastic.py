"""Static batching whose members leave when they are done: late arrivals still wait until everybody has left.

Who has all its tokens is answered at once and stops costing; prompts are padded as in `static`. What is between
`static` and this is the price of holding rows, what is between this and `dynamic` that of joining late.
"""

from __future__ import annotations

from dataclasses import replace

from policies import static
from scheduling.sequence import Sequence


class Policy(static.Policy):
    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self.claims = replace(self.claims, holds=False)

    def release(self, running: list[Sequence]) -> list[Sequence]:
        return [seq for seq in running if seq.is_finished]

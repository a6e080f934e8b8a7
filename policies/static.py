"""Static batching: a batch starts together, runs to its longest member, and is answered together.

The batch is a rectangle, as in a classic server: prompts are padded to the longest, and finished members are still
computed (and counted as held) until all are done. No request joins meanwhile. It is greedy: an idle engine takes the
waiting requests, up to its slots, and never waits for more (bulk service).
"""

from collections.abc import Collection

from scheduling import policy
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    padded = True
    closed = True

    def __init__(self) -> None:
        self.claims = self.claims.but(holds=True)

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        return 0 if running else min(len(waiting), budget.slots)

    def release(self, running: list[Sequence]) -> list[Sequence]:
        return list(running) if all(seq.is_finished for seq in running) else []

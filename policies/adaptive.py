"""Dynamic batching that finds its batch size: one more while tokens come fast enough, half of it when not (AIMD).

Every `every` decode steps, the 99th percentile of their lengths, which is that of the gaps between tokens, is compared
with `target`. When the size is halved, running requests finish, and none joins until enough have left (Chiu and Jain
1989; for batch sizes Clipper, NSDI 2017).
"""

from collections.abc import Collection

from scheduling import policy
from scheduling.iteration import Plan
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    target = option(0.05, "target for the p99 of seconds between tokens", low=0.0)
    every = option(20, "decode steps between two checks of the gaps", low=1, high=10_000)

    def __init__(self) -> None:
        self.batch_size = 1  # the current batch size
        self._gaps: list[tuple[float, int]] = []  # seconds of a step, and how many tokens waited for it

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        return max(0, min(len(waiting), budget.slots, self.batch_size - len(running)))

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        decodes = sum(1 for seq in plan.sequences if len(seq.output_ids) > 1)
        if not decodes:
            return
        self._gaps.append((now - plan.started_at, decodes))
        if len(self._gaps) >= self.every:
            self._adapt()
            self._gaps.clear()

    def _adapt(self) -> None:
        slow = sum(tokens for gap, tokens in self._gaps if gap > self.target)
        if 100 * slow > sum(tokens for _, tokens in self._gaps):
            self.batch_size = max(1, self.batch_size // 2)
        else:
            self.batch_size = min(self.max_batch_size, self.batch_size + 1)

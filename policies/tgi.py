"""TGI's queue (Hugging Face text-generation-inference, router/src/infer.rs): requests join only if enough of them wait.

With n running, waiting requests join only when at least floor(n x ratio) of them fit, or any number of them after
`max_waiting` decode steps without one joining. They get a step for their prompts, in which the others pause, and a
decode step follows before the next try. The prompts and answers of a batch have at most `max_total_tokens` together; a
longer request runs alone.
"""

from collections.abc import Collection
from math import floor

from scheduling import policy
from scheduling.iteration import Plan
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    separate_prefill = True
    ratio = option(0.3, "waiting requests required per running request (1.2 in 2023)", low=0.0)
    max_waiting = option(20, "decode steps after which any number of waiting requests suffices", low=0)
    max_total_tokens = option(1 << 60, "prompt and answer tokens of a batch", low=1)

    def __init__(self) -> None:
        self._decodes = 0  # steps since a request joined

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if not running:
            return min(len(waiting), budget.slots)
        if not self._decodes:
            return 0
        needed = 1 if self._decodes >= self.max_waiting else floor(len(running) * self.ratio)
        return budget.slots if self._fit(waiting, running, budget, now, needed) else 0

    def _fit(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float, needed: int
    ) -> bool:
        """Return whether the first `needed` requests in order fit together."""
        if needed > min(len(waiting), budget.slots):
            return False
        joining = list(running)
        for seq in self.order(waiting, now) if needed else ():
            if not budget.fits(self.reserve_tokens(seq)) or self.blocked_by(seq, joining, budget) is not None:
                return False
            joining.append(seq)
            if len(joining) == len(running) + needed:
                break
            budget = budget.minus(self.reserve_tokens(seq))
        return len(joining) == len(running) + needed

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        prompts = [other.pending for other in running if other.is_prefilling]
        if prompts and sum(prompts) + seq.pending - self.cached_tokens(seq) > budget.tokens:
            return "token_budget"
        total = sum(other.total for other in running) + seq.total
        return "kv_full" if running and total > self.max_total_tokens else None

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._decodes = 0

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        self._decodes += any(len(seq.output_ids) > 1 for seq in plan.sequences)

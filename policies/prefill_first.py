"""Prefill first (vLLM v0, SOSP 2023): a step computes prompts if a new request fits, and otherwise decodes.

Decodes never share a step with prompt tokens, so a stream of arrivals stalls all other streams for whole prompts.
Requests join as far as slots, KV and the tokens of one step allow. With `kv_tokens`, they are admitted by the tokens
they have now, as in vLLM, and when the KV is full the newest loses its slot and is recomputed later. Without it, pages
are reserved for whole answers and no request is preempted.
"""

from collections.abc import Collection

from scheduling import policy
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    separate_prefill = True
    max_batched_tokens = option(2048, "maximum prompt tokens per step", low=1)
    kv_tokens = option(0, "KV tokens for admission and preemption; 0: use the pages", low=0)

    def __init__(self) -> None:
        self.preempts = self.kv_tokens > 0
        self.claims = self.claims.but(limits_kv=self.preempts)

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        prompts = [other.pending for other in running if other.is_prefilling]
        size = seq.pending - self.cached_tokens(seq)
        if (prompts and sum(prompts) + size > budget.tokens) or len(running) >= budget.tokens:
            return "token_budget"
        used = sum(other.length for other in running) if self.kv_tokens else 0
        if running and used + seq.length + len(running) >= self.kv_tokens > 0:
            return "kv_full"
        return None

    def preempt(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float
    ) -> list[Sequence]:
        live = [seq for seq in running if not seq.is_finished]
        used = sum(seq.length for seq in live)
        newest: list[Sequence] = []
        while used > self.kv_tokens and len(live) > 1:
            newest.append(live.pop())
            used -= newest[-1].length
        return newest

"""LightLLM's and S-LoRA's loop: admit every few decode steps, by the peak that the KV cache will reach.

Admission is tried when no request runs, or when `max_wait` decode steps have passed since the last one joined, and then
in each step until one does. A candidate fits if the tokens in cache stay below `pool` to the end: with all requests
sorted by the tokens still to come, most first, max over k of (rest_k x k + sum of what the first k hold now). Requests
that join get a step for their prompts, at most `batch_max_tokens` of them, in which the others pause. No request is
ever preempted. A request that exceeds the pool runs alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from scheduling import policy
from scheduling.iteration import Plan
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    separate_prefill = True
    max_wait = option(10, "decode steps between two admissions", low=0)
    batch_max_tokens = option(3072, "maximum prompt tokens per admission", low=1)
    pool = option(10_000, "KV tokens", low=1)
    per_client = option(0, "KV tokens reserved for each client in the batch (adapters)", low=0)

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self._decodes = 0  # steps since a request joined
        if self.per_client and "client" not in self.claims.heeds:
            self.claims = replace(self.claims, heeds=(*self.claims.heeds, "client", "length"))

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        due = not running or self._decodes >= self.max_wait
        return min(len(waiting), budget.slots) if due else 0

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        prompts = [other.pending for other in running if other.is_prefilling]
        most = min(self.batch_max_tokens, budget.tokens)
        if prompts and sum(prompts) + seq.pending > most:
            return "token_budget"
        batch = [*running, seq]
        pool = self.pool - self.per_client * len({other.client for other in batch})
        return "kv_full" if running and self._peak(batch) >= pool else None

    @staticmethod
    def _peak(batch: list[Sequence]) -> int:
        """Return the most tokens that the cache will hold if no other request joins."""
        parts = [
            (s.max_tokens - len(s.output_ids), s.length - bool(s.output_ids))  # the newest is not in cache yet
            for s in batch
        ]
        peak = held = 0
        for k, (rest, holds) in enumerate(sorted(parts, reverse=True), 1):
            held += holds
            peak = max(peak, rest * k + held)
        return peak

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._decodes = 0

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        self._decodes += any(len(seq.output_ids) > 1 for seq in plan.sequences)

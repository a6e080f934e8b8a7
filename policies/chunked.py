"""Chunked prefill (Sarathi-Serve, OSDI 2024; vLLM V1; Dynamic SplitFuse): a step computes at most max_batched_tokens.

One token for each decode comes first, then the rest of the prompts that have begun, then new prompts as far as that
limit, slots and KV allow; the last prompt is cut. Decodes are never left out, so no stream stalls for a whole prompt.
Without a limit it is `dynamic`.
"""

from scheduling import policy
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    max_batched_tokens = option(512, "maximum tokens per step", low=1)

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        used = sum(other.pending for other in running)
        return "token_budget" if used >= budget.tokens else None

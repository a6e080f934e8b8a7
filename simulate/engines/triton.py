"""TensorRT-LLM's in-flight batching, as Triton serves it: prompts join the step of the decodes, whole unless chunked.

`guaranteed_no_evict` sets memory for a whole answer aside; `max_utilization` takes it as needed, and the last to join waits
again when none is left. Source: "Useful Runtime Options" and "Tuning Max Batch Size and Max Num Tokens" in the documents of
TensorRT-LLM 1.0, and config.pbtxt of tensorrtllm_backend.
"""

from __future__ import annotations

from scheduling import policy
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Policy(policy.Policy):
    capacity = option("guaranteed_no_evict", "memory at admission", choices=("guaranteed_no_evict", "max_utilization"))
    chunked_context = option(False, "cut prompts to the tokens that are left in a step")
    blocks_until_change = True

    def reserve_tokens(self, seq: Sequence) -> int:
        return seq.length if self.capacity == "max_utilization" else seq.total

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        size = 1 if self.chunked_context else seq.pending - self.cached_tokens(seq)
        used = sum(other.pending for other in running)
        return "token_budget" if running and used + size > budget.tokens else None

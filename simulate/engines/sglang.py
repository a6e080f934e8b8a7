"""SGLang's scheduler: new prompts run before decodes, in steps of their own, and join by an estimate of the memory to come.

A prompt longer than the tokens of a step (chunked_prefill_size) is cut. Each running request counts a part of what it may
still generate, 4,096 tokens at most. Once a request does not fit, none joins until one leaves; that with the fewest tokens
waits again when memory runs out. Left out: the part is greater in the first 600 decode steps and after memory ran out; then
requests go to the end of the queue, here to its head; pages have one token, here those of the engine. Source:
python/sglang/srt/managers/scheduler.py, schedule_policy.py (`PrefillAdder`), schedule_batch.py (`retract_decode`), 0.5.
"""

from __future__ import annotations

from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

from . import vllm  # not by its full name, since a policy may not import from the simulator

PART, LONGEST = 0.098, 4096  # of the tokens to come, and the most of them, that a request counts


class Policy(vllm.Policy):
    separate_prefill = True
    conservativeness = option(1.0, "schedule_conservativeness", low=0.0)
    _is_full = False

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        if sum(other.pending for other in self._prompts) >= budget.tokens:
            return "token_budget"
        if running and not self._is_full:
            part = min(1.0, PART * self.conservativeness)
            to_come = sum(_rest(other) * (1.0 if other in self._prompts else part) for other in running)
            unknown = 0 if self.blocks_until_change else self._tokens_left
            need = seq.length - self.cached_tokens(seq) + _rest(seq)
            self._is_full = need >= budget.kv_tokens - unknown - to_come
        return "kv_full" if self._is_full and running else None

    def victim(self, running: list[Sequence], now: float) -> Sequence:
        self._is_full = False
        return min(running, key=lambda seq: (len(seq.output_ids), -len(seq.prompt_ids)))

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._is_full = False


def _rest(seq: Sequence) -> int:
    """Return how many more tokens a request counts on."""
    return min(LONGEST, seq.max_tokens - len(seq.output_ids))

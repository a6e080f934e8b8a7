"""SGLang's scheduler: new prompts run before decodes, in steps of their own, and join by an estimate of the memory to come.

A prompt longer than the tokens of a step (chunked_prefill_size) is cut. Each running request counts a part of what it may
still generate, 4,096 tokens at most: 0.7 at first, 0.098 after 600 decode steps, and what was needed when memory ran out
and that with the fewest tokens had to wait again. Once a request does not fit, none joins until one leaves. Left out:
retracted ones go to the end of the queue, here to its head; pages have one token, here those of the engine. Source:
python/sglang/srt/managers/scheduler.py, schedule_policy.py (`PrefillAdder`), schedule_batch.py (`retract_decode`), 0.5.
"""

from __future__ import annotations

from collections.abc import Collection

from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence

from . import vllm  # not by its full name, since a policy may not import from the simulator

FIRST, LEAST, STEPS = 0.7, 0.14, 600  # the part at first, the least one as a part of it, and the steps between them
LONGEST, AHEAD = 4096, 20  # tokens that a request counts at most; steps that are to fit after one was retracted


class Policy(vllm.Policy):
    separate_prefill = True
    conservativeness = option(1.0, "schedule_conservativeness", low=0.0)

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self._part = self._first = min(1.0, FIRST * self.conservativeness)
        self._is_full = False
        self._counted: tuple[Sequence, int] | None = None  # one that ran when steps were counted, and its tokens

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        if not running:
            self._part, self._is_full, self._counted = self._first, False, None
        elif self._counted is not None:
            seq, tokens = self._counted
            steps = max(0, len(seq.output_ids) - tokens)  # every member gets a token in a decode step
            self._part = max(self._first * LEAST, self._part - self._first * (1 - LEAST) / STEPS * steps)
            self._counted = _counted(running[-1])
        return super().admit(waiting, running, budget, now)

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        if sum(other.pending for other in self._prompts) >= budget.tokens:
            return "token_budget"
        if running and not self._is_full:
            to_come = sum(_rest(other) * (1.0 if other in self._prompts else self._part) for other in running)
            unknown = 0 if self.blocks_until_change else self._tokens_left
            need = seq.length - self.cached_tokens(seq) + _rest(seq)
            self._is_full = need >= budget.kv_tokens - unknown - to_come
        return "kv_full" if self._is_full else None

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._counted = self._counted or _counted(seq)

    def victim(self, running: list[Sequence], now: float) -> Sequence:
        needed = sum(len(seq.output_ids) + AHEAD for seq in running)
        self._part = min(1.0, needed / (sum(seq.max_tokens for seq in running) + 1))
        self._is_full = False
        return min(running, key=lambda seq: (len(seq.output_ids), -len(seq.prompt_ids)))

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._is_full = False


def _rest(seq: Sequence) -> int:
    """Return how many more tokens a request counts on."""
    return min(LONGEST, seq.max_tokens - len(seq.output_ids))


def _counted(seq: Sequence) -> tuple[Sequence, int]:
    """Return a request with its tokens, the next one counted if a prompt's step brings it."""
    return seq, len(seq.output_ids) + seq.is_prefilling

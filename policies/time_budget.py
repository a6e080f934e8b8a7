"""Chunked prefill by time: a step computes as many prompt tokens as fit before the next token of the tightest stream is due.

(FairBatching, arXiv 2510.14392.) The token after n others of an answer is due n x `itl` seconds after its first one, so a stream
that is ahead lends its time to prompts. While requests decode and prompts wait, prompts get at least `share` of the time in any
case, as in a public fork of vLLM; what a step falls short of it, later ones make up. How long a step takes is learned from the
steps (`_step_time.py`); until then, and where nothing decodes, the limit is a number of tokens as in `chunked`.

Ours: the values of the options. Left out: FairBatching's order of requests within a step, and its part for several engines.
"""

from math import inf

from policies import chunked
from policies._step_time import FITTED, StepTime, computed
from scheduling.iteration import Plan
from scheduling.options import option
from scheduling.sequence import Sequence

UNKNOWN = 512  # prompt tokens of a step before the time of steps is known
MOST_AHEAD = 0.1  # seconds by which prompts may be ahead of their share, as far as that counts
MOST_OWED = 1.0  # the same behind it


class Policy(chunked.Policy):
    times_steps = True
    max_batched_tokens = 1 << 60  # set before each step
    itl = option(0.05, "target for the mean seconds between two tokens of an answer", low=0.0)
    share = option(0.2, "share of the time that prompts get at least, while others decode", low=0.0, high=0.9)
    max_prompt_tokens = option(2048, "maximum prompt tokens per step", low=1)

    def __init__(self) -> None:
        self.law = StepTime()
        self.alone = 0.0  # seconds that a step of the streams takes without prompts
        self._owed = 0.0  # seconds by which prompts are behind their share
        self.max_batched_tokens = self.max_batch_size + min(UNKNOWN, self.max_prompt_tokens)

    def on_step(self, plan: Plan, now: float) -> None:
        super().on_step(plan, now)
        prompt, rows, context = computed(plan)
        seconds = now - plan.started_at
        self.law.learn(prompt, rows, context, seconds)
        # Where prompts got all that they could use, they were not short of time.
        if rows and sum(plan.counts) >= self.max_batched_tokens and self.law.steps > FITTED:
            spent = min(seconds, max(0.0, seconds - self.law.seconds(0, rows, context)))
            self._owed = min(MOST_OWED, max(-MOST_AHEAD, self._owed + self.share * seconds - spent))
        decoding = context = 0
        left = inf  # seconds of the tightest stream
        for seq in (*plan.sequences, *plan.paused):
            if seq.finish_reason is None and not seq.is_prefilling:
                decoding, context = decoding + 1, context + seq.length
                left = min(left, self.time_left(seq, now))
        self.max_batched_tokens = decoding + self._prompt_tokens(decoding, context, left)

    def time_left(self, seq: Sequence, now: float) -> float:
        """Return the seconds until the next token of a stream is due."""
        return (seq.first_token_at or now) + self.itl * len(seq.output_ids) - now

    def _prompt_tokens(self, decoding: int, context: int, left: float) -> int:
        """Return how many prompt tokens the next step may compute, one at least so that prompts make progress."""
        if not decoding:
            return self.max_prompt_tokens
        if self.law.steps <= FITTED:
            return min(UNKNOWN, self.max_prompt_tokens)
        self.alone = self.law.seconds(0, decoding, context)
        due = (self.share * self.alone + self._owed) / (1 - self.share)
        return int(max(1.0, min(self.law.prompt_tokens(max(left - self.alone, due)), self.max_prompt_tokens)))

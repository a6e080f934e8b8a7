"""What an engine makes of a text: bits per byte, and greedy continuations. Both through the scheduler and the runner.

It must not know formats, models or tokenizers.
"""

from __future__ import annotations

import collections.abc as abc
import math
from typing import NamedTuple

from dev.benchmarks import offline
from generate.params import GREEDY, SamplingParams
from generate.runner import Runner
from scheduling.sequence import Sequence

SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)
TOKENS_PER_STEP = 256


class Agreement(NamedTuple):
    """`tokens`: the share of tokens before the first difference. `texts`: the number of equal texts."""

    tokens: float
    texts: int


def bits_per_byte(
    runner: Runner, ids: abc.Sequence[int], first: abc.Sequence[int], n_bytes: int, window: int, stride: int
) -> float:
    """Return the bits per byte of `n_bytes` of text with these ids, each predicted from at least `window - stride` others.

    `first` is what the tokenizer puts before every text. Without it, the first token of the text is not predicted.
    """
    judged = 0 if first else 1
    nats = 0.0
    while judged < len(ids):
        end = min(judged + stride if judged > 1 else window, len(ids))
        prompt = [*first, *ids[max(0, end - window) : end]]
        seq = Sequence(prompt, 1, sampling=SCORED)
        offline.serve(runner, [seq], "dynamic", 1, TOKENS_PER_STEP)
        if seq.error is not None:
            raise seq.error
        nats -= sum(detail.logprob for detail in seq.prompt_details[judged - end :])
        judged = end
    return nats / math.log(2) / n_bytes


def greedy_texts(runner: Runner, prompts: abc.Sequence[abc.Sequence[int]], tokens: int, slots: int) -> list[list[int]]:
    """Return the likeliest continuations of the prompts, computed `slots` at a time."""
    sequences = [Sequence(list(prompt), tokens, id=str(i), sampling=GREEDY) for i, prompt in enumerate(prompts)]
    offline.serve(runner, sequences, "dynamic", slots, TOKENS_PER_STEP)
    return [seq.output_ids for seq in sequences]


def agreement(texts: abc.Sequence[abc.Sequence[int]], expected: abc.Sequence[abc.Sequence[int]]) -> Agreement:
    """Compare texts of the same prompts."""
    equal = total = 0
    for text, other in zip(texts, expected, strict=True):
        total += len(other)
        equal += next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
    return Agreement(equal / total, sum(list(a) == list(b) for a, b in zip(texts, expected)))

"""What the benchmarks of the engine share: sequences in the middle of decoding, and serving without HTTP."""

from __future__ import annotations

import collections.abc as abc

from generate.params import SamplingParams
from generate.runner import Runner
from policies import get_policy
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


def decoding(runner: Runner, batch: int, context: int, temperature: float, spare: int = 64) -> list[Sequence]:
    """Return sequences with `context` tokens that decode the next one, on pages of their own for `spare` more."""
    pages = -(-(context + spare) // runner.page_size)
    vocabulary = runner.config.vocab_size
    result = []
    for i in range(batch):
        prompt = [(i * 7919 + j) % vocabulary for j in range(context)]
        seq = Sequence(prompt, 1 << 20, id=str(i), sampling=SamplingParams(temperature=temperature, seed=i))
        seq.output_ids, seq.computed = [(i * 7919 + 1) % vocabulary], context  # equal tokens would go to equal experts
        seq.pages = list(range(1 + i * pages, 1 + (i + 1) * pages))
        result.append(seq)
    return result


def serve(
    runner: Runner, sequences: abc.Sequence[Sequence], policy: str, slots: int, tokens_per_step: int = 2048
) -> None:
    """Compute `sequences`, which all arrive at once, under `policy` with `slots` slots and no prefix cache."""
    pool = PagePool(runner.keys.shape[1], runner.page_size, prefix_cache=False)
    scheduler = Scheduler(get_policy(policy, max_batch_size=slots), pool, tokens_per_step)
    for seq in sequences:
        scheduler.add(seq)
    while not scheduler.is_idle:
        scheduler.step(runner.forward, lambda: 0.0)

"""A hundred texts of the built-in model in every number format and every way to multiply: alone and among 64, token for
token and bit for bit of every log probability."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import policies
from generate.cpu import linear
from generate.cpu.attention import CAttention
from generate.cpu.declarations import declarations
from generate.params import SamplingParams
from generate.runner import ModelRunner
from models import weights
from models.sources import catalog
from models.text.tokenizer import load_tokenizer
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence

PAGES, PAGE_SIZE = 320, 64
RUNS = [
    (format, kv, way)
    for format in linear.FORMATS
    for kv in (None, torch.int8)
    for way in ("tiles", "dot", "fma")
    if format == "none" or way != "fma"  # bytes are multiplied in tiles or in vectors
]
CASES = [
    pytest.param(
        *run, id=f"{run[0]}-{'int8 KV-' if run[1] else ''}{run[2]}", marks=[] if run == RUNS[-1] else pytest.mark.full
    )
    for run in RUNS
]

pytestmark = pytest.mark.skipif(not linear.kernel_runs("int8"), reason="needs a C compiler")


def sequences(n: int) -> list[Sequence]:
    """Return requests whose prompts are pieces of a play, at temperatures of 0 and 1."""
    rng = random.Random(5)
    play = load_tokenizer(catalog.resolve("bard")).encode((catalog.BARD / "held_out.txt").read_text()[:20_000])
    result = []
    for i in range(n):
        at, length = rng.randrange(len(play) - 60), rng.randrange(1, 60)
        params = SamplingParams(temperature=float(i % 2), seed=i, logprobs=2)
        result.append(Sequence(play[at : at + length], rng.randrange(4, 17), id=str(i), sampling=params))
    return result


def outputs(runner: ModelRunner, requests: list[Sequence], slots: int) -> dict[str, list[Any]]:
    """Return each request's tokens with their log probabilities."""
    found: dict[str, list[Any]] = {seq.id: [] for seq in requests}

    def forward(plan: Plan) -> list[Output]:
        computed = runner.forward(plan)
        for seq, token in zip(plan.sequences, computed):
            if token is not None:
                found[seq.id].append((token.id, token.detail))
        return computed

    scheduler = Scheduler(policies.get_policy("dynamic", slots), PagePool(PAGES, PAGE_SIZE), 256)
    for seq in requests:
        scheduler.add(seq)
    while scheduler.step(forward, lambda: 0.0) is not None:
        pass
    return found


@pytest.fixture
def multiply() -> Iterator[Callable[[ModelRunner, str], None]]:
    """Let a runner multiply in a way, if this processor has it, until the test ends."""
    library, ways = linear._library(), declarations().constants

    def use(runner: ModelRunner, way: str) -> None:
        if not library.packed_linear_has(ways[way.upper()]):
            pytest.skip(f"needs a processor that multiplies bfloat16 by {way}")
        library.packed_linear_use(ways[way.upper()])
        if isinstance(runner.attend, CAttention) and runner.keys.dtype == torch.bfloat16:
            runner.attend.use(way)

    yield use
    library.packed_linear_use(ways[linear.bfloat16_way().upper()])


@pytest.mark.parametrize(("format", "kv", "way"), CASES)
def test_each_text_and_its_log_probabilities_are_the_same_alone_and_among_64(
    format: str, kv: torch.dtype | None, way: str, multiply: Callable[[ModelRunner, str], None]
) -> None:
    runner = ModelRunner(weights.load(catalog.resolve("bard"), torch.bfloat16), PAGES, PAGE_SIZE, kv, format)
    multiply(runner, way)
    together = outputs(runner, sequences(100), 64)
    assert {len(tokens) for tokens in together.values()} > {4, 16}
    assert outputs(runner, sequences(100), 1) == together

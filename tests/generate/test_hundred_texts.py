"""A hundred texts of the built-in model in every number format and every way to multiply: alone and among 64, token for
token and bit for bit of every log probability."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from generate.cpu import linear
from generate.cpu.attention import CAttention
from generate.params import SamplingParams
from generate.runner import ModelRunner
from models import weights
from models.sources import catalog
from models.text.tokenizer import load_tokenizer
from scheduling.sequence import Sequence
from tests.support.generate import run

PAGES, PAGE_SIZE = 320, 64
RUNS = [
    (format, kv, way)
    for format in linear.FORMATS
    for kv in (None, torch.int8)
    for way in ("TILES", "DOT", "FMA")
    if format == "none" or way != "FMA"  # bytes are multiplied in tiles or in vectors
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


def outputs(runner: ModelRunner, slots: int) -> list[Any]:
    """Return the tokens of a hundred requests, with their log probabilities."""
    requests = sequences(100)
    run(None, requests, slots=slots, budget=256, arrivals=100, pages=PAGES, runner=runner)
    return [(seq.output_ids, seq.details) for seq in requests]


@pytest.mark.parametrize(("format", "kv", "way"), CASES, indirect=["way"])
def test_each_text_and_its_log_probabilities_are_the_same_alone_and_among_64(
    format: str, kv: torch.dtype | None, way: str
) -> None:
    runner = ModelRunner(weights.load(catalog.resolve("bard"), torch.bfloat16), PAGES, PAGE_SIZE, kv, format)
    takes_ways = isinstance(runner.attend, CAttention) and runner.keys.dtype == torch.bfloat16
    if takes_ways:
        runner.attend.use(way.lower())
    together = outputs(runner, 64)
    assert {len(tokens) for tokens, _ in together} > {4, 16}
    assert all(len(details) == len(tokens) for tokens, details in together)
    assert outputs(runner, 1) == together
    if takes_ways:
        runner.attend.use(linear.bfloat16_way())

"""A head that prompts share within one step changes no bit of any text, whichever loop computes it and whatever fails."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

import policies
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY, SamplingParams
from generate.runner import ModelRunner, Runner
from models.gpt2 import GPTConfig
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from serving.recovery import Recovery
from tests.support.faults import Faults
from tests.support.generate import NAN, make_model

CONFIG = GPTConfig(block_size=576, vocab_size=301, n_layer=2, n_head=2, n_embd=128)
PAGE_SIZE, PAGES, HEAD, COUNT = 16, 1200, 500, 64
FORMATS = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "int8": (torch.float32, torch.int8)}


def burst(count: int = COUNT) -> list[Sequence]:
    """Return requests with a head of 500 tokens; some want log probabilities, of their prompts too."""
    rng = random.Random(3)
    head = [rng.randrange(CONFIG.vocab_size) for _ in range(HEAD)]
    result = []
    for i in range(count):
        tail = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(1, 24))]
        params = SamplingParams(seed=i, logprobs=1 if i % 5 == 1 else None)
        result.append(Sequence(head + tail, rng.randrange(2, 9), id=str(i), sampling=params))
    return result


def make_runner(form: str) -> Runner:
    dtype, kv_dtype = FORMATS[form]
    runner = ModelRunner(make_model(CONFIG, dtype), PAGES, PAGE_SIZE, kv_dtype)
    if kv_dtype is None:
        runner.keys.fill_(NAN)  # a page that is read before it is written makes its text fail
        runner.values.fill_(NAN)
    return runner


def serve(
    runner: Any, sequences: list[Sequence], policy: str, pages: int = PAGES, **options: Any
) -> tuple[list[Any], int]:
    """Return the texts, and the prompt tokens that were computed, those of failed steps apart."""
    pool = PagePool(pages, PAGE_SIZE, prefix_cache=options.pop("prefix_cache", True))
    scheduler = Scheduler(policies.get_policy(policy, COUNT), pool, options.pop("budget", 2048))
    recovery = Recovery(runner, lambda: Sequence([0], 1, sampling=GREEDY), lambda: 0.0)
    tokens = 0

    def forward(plan: Plan) -> list[Output]:
        nonlocal tokens
        outputs = recovery.compute(scheduler, plan)
        tokens += sum(count for seq, count in zip(plan.sequences, plan.counts) if not seq.output_ids)
        return outputs

    for seq in sequences:
        scheduler.add(seq)
    while scheduler.step(forward, lambda: 0.0):
        assert not recovery.is_suspect or recovery.probe()
    assert pool.used == 0
    return [(seq.output_ids, seq.details, seq.error) for seq in sequences], tokens


@cache
def alone(form: str) -> list[Any]:
    return serve(make_runner(form), burst(), "nobatch", prefix_cache=False)[0]


@pytest.mark.parametrize(
    ("policy", "form"), [("static", "float32"), ("chunked", "float32"), *(("dynamic", form) for form in FORMATS)]
)
def test_a_burst_of_64_computes_a_head_of_500_tokens_once_and_gives_the_texts_of_each_alone(
    policy: str, form: str
) -> None:
    texts, tokens = serve(make_runner(form), burst(), policy)
    assert texts == alone(form)
    tails = sum(len(seq.prompt_ids) - HEAD // PAGE_SIZE * PAGE_SIZE for seq in burst())
    assert tokens <= 1.1 * HEAD + tails


@pytest.mark.parametrize("policy", ["dynamic", "static", "chunked"])
def test_steps_that_fail_and_memory_that_runs_out_change_no_text(policy: str) -> None:
    armed = Faults(oom_above={"batch": 9, "after": 2}, fail_once={})
    texts, _ = serve(armed.model(make_runner("float32"), lambda ids: ""), burst(), policy, budget=640)
    assert texts == alone("float32")


class Poisoned(ModelRunner):
    """A runner whose steps fail while the first request is in them."""

    def forward(self, plan: Plan) -> list[Output]:
        if any(seq.id == "0" for seq in plan.sequences):
            raise RuntimeError("poisoned")
        return super().forward(plan)


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_those_that_share_the_head_of_a_request_that_fails_get_their_texts(policy: str) -> None:
    runner = Poisoned(make_model(CONFIG), PAGES, PAGE_SIZE)
    texts, _ = serve(runner, burst(), policy)
    assert texts[0][2] is not None
    assert texts[1:] == alone("float32")[1:]


def test_requests_that_lose_their_pages_get_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "margin", 1)  # requests grow from their first tokens on
    expected, crowded = burst(12), burst(12)
    for seq in (*expected, *crowded):
        seq.max_tokens, seq.open_ended = 48, True
    texts, _ = serve(make_runner("float32"), crowded, "dynamic", pages=48, budget=100)
    assert texts == serve(make_runner("float32"), expected, "nobatch", prefix_cache=False)[0]
    assert sum(seq.preemptions for seq in crowded) > 3


def test_a_gpu_shares_a_head_within_a_step_too() -> None:
    runner = GpuRunner(make_model(CONFIG), PAGES, PAGE_SIZE, capacity=COUNT)
    texts, tokens = serve(runner, burst(), "dynamic")
    assert [ids for ids, _, _ in texts] == [ids for ids, _, _ in alone("float32")]
    assert tokens < 3 * HEAD + COUNT * 24

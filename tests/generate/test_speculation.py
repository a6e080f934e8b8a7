"""A text is the same to the token with speculation and without it, whatever drafts and however many."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import policies
from generate.drafters.model import ModelDrafter
from generate.drafters.ngram import NgramDrafter
from generate.gpu.runner import GpuRunner
from generate.params import SamplingParams
from generate.runner import ModelRunner, Runner
from models.gpt2 import GPT, GPTConfig
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from tests.support import points
from tests.support.generate import make_model as sharpened

CONFIG = GPTConfig(block_size=192, vocab_size=61, n_layer=2, n_head=2, n_embd=128)
PAGE = 16


def make_model(dtype: torch.dtype = torch.bfloat16, seed: int = 5, noise: float = 0.0) -> GPT:
    """Return a random model; with a little noise it often agrees with the one without, and often not."""
    model = sharpened(CONFIG, torch.float32, seed, 3)
    model.transformer.ln_f.weight.mul_(6)  # some texts repeat themselves at high temperatures, too
    for parameter, other in zip(model.parameters(), make_model(torch.float32, 6).parameters() if noise else ()):
        parameter.add_(other, alpha=noise)
    return model.to(dtype)


def requests(n: int, seed: int, temperature: float, **sampling: Any) -> list[Sequence]:
    """Return requests, half of them with prompts that repeat themselves."""
    rng = random.Random(seed)
    made = []
    for i in range(n):
        part = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(3, 12))]
        prompt = (part * 9)[: rng.randrange(1, 60)] if i % 2 else part
        params = SamplingParams(temperature=temperature, seed=seed * 1000 + i, **sampling)
        made.append(Sequence(prompt, rng.randrange(1, 50), id=str(i), sampling=params, client=str(i % 3)))
    return made


def serve(
    sequences: list[Sequence],
    speculator: Speculator | None,
    *,
    runner: Runner,
    pages: int = 400,
    slots: int = 8,
    budget: int = 64,
    cancel: int = 0,
    policy: str = "dynamic",
) -> dict[str, list[int]]:
    """Return the tokens by request; every `cancel` steps one is cancelled."""
    pool = PagePool(pages, PAGE, prefix_cache=True)
    scheduler = Scheduler(policies.get_policy(policy, slots), pool, budget, speculator=speculator)
    scheduler.policy.margin = 4
    clock = iter(range(1 << 30))
    for seq in sequences:
        seq.open_ended = True
        scheduler.add(seq)
    steps = 0
    while not scheduler.is_idle:
        iteration = scheduler.step(runner.forward, lambda: next(clock) / 10)
        assert iteration is not None
        assert sum(iteration.slot_steps) == pytest.approx(slots)
        steps += 1
        if cancel and steps % cancel == 0 and scheduler.running:
            scheduler.remove_all([scheduler.running[steps % len(scheduler.running)]], steps)
    assert pool.free == pool.total
    return {seq.id: seq.output_ids for seq in sequences}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(make_model(), 400, PAGE)


def small_drafter(runner_of: GPT, pages: int = 400) -> ModelDrafter:
    return ModelDrafter(ModelRunner(runner_of, pages, PAGE), pages, CONFIG.block_size)


class Room(NamedTuple):
    """What a server has; every `cancel` steps a request is cancelled."""

    pages: int = 400
    slots: int = 8
    cancel: int = 0
    policy: str = "dynamic"
    budget: int = 64


ROOMS = {
    "alone": Room(slots=1),
    "cancellations": Room(slots=16, cancel=5),
    "a tiny pool": Room(pages=14),
    "among 64": Room(slots=64, budget=1024),
    "a tiny pool and cancellations": Room(pages=14, cancel=7),
    "preemption by the policy": Room(policy="dynamic+mlfq"),
}
SERVED, FEW = 164, 16  # of the many at least a hundred are in a batch of 64
MODELS: dict[str, dict[str, Any]] = {"same": {}, "other": {"seed": 6}, "half": {"noise": 0.05}}


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> Callable[[int, float], dict[str, list[int]]]:
    """Return the texts of so many seeds at a temperature, each computed alone and without drafts."""
    return functools.cache(lambda n, temperature: serve(requests(n, 7, temperature), None, runner=runner, slots=1))


@pytest.mark.parametrize(
    ("count", "temperature", "room"),
    points(
        6,
        *((FEW, temperature, room) for temperature in (0, 1.5) for room in [*ROOMS][:3]),
        *((SERVED, temperature, room) for temperature in (0, 0.7, 1.5) for room in ROOMS),
    ),
)
def test_each_text_is_that_computed_alone_without_drafts(
    runner: ModelRunner, alone: Callable[[int, float], dict[str, list[int]]], count: int, temperature: float, room: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "generate.drafters.model.WORTHWHILE", 1e9
    )  # draft models begin each text, however long it takes
    has = ROOMS[room]
    for fixed, draft in itertools.product((0, 2, 8, None), ("", "half") if count == SERVED else ("", *MODELS)):
        drafter = small_drafter(make_model(**MODELS[draft]), has.pages) if draft else NgramDrafter()
        sequences = requests(count, 7, temperature)
        served = serve(sequences, Speculator(drafter, fixed), runner=runner, **has._asdict())
        for seq in sequences:
            text = alone(count, temperature)[seq.id]
            assert served[seq.id] == (text[: len(served[seq.id])] if seq.finish_reason == "abort" else text)
        drafted, accepted = sum(seq.drafted for seq in sequences), sum(seq.accepted for seq in sequences)
        assert draft != "same" or accepted == drafted
        assert not accepted or fixed != 0
        assert not draft or drafter.pool.free == has.pages - 1
        finished = [seq for seq in sequences if seq.finish_reason != "abort"]
        assert (len(finished) < count) == bool(has.cancel)
        assert bool(sum(seq.preemptions for seq in sequences)) == (has.pages == 14 or has.policy != "dynamic")
        if count == SERVED:
            assert len(finished) > 40
            assert (
                accepted > 50 or fixed == 0 or (fixed is None and has.slots > 1)
            )  # as many as are worth it may be none
            assert has.slots < 64 or sum(seq.batch_max == 64 for seq in sequences) >= 100


def test_a_gpus_runner_takes_the_same_plans() -> None:
    runner = GpuRunner(make_model(torch.float32), 400, PAGE, capacity=8)
    assert runner.warm_up()
    for temperature in (0, 1):
        plain = serve(requests(12, 2, temperature), None, runner=runner)
        sequences = requests(12, 2, temperature)
        assert serve(sequences, Speculator(NgramDrafter(), 4), runner=runner) == plain
        assert temperature or sum(seq.accepted for seq in sequences)


def test_drafts_share_a_step_with_scored_prompts_log_probabilities_and_penalties(runner: ModelRunner) -> None:
    def mixed() -> list[Sequence]:
        sequences = requests(12, 3, 0, logprobs=2, repetition_penalty=1.2)
        sequences += requests(6, 4, 0, prompt_logprobs=1)
        for i, seq in enumerate(sequences):
            seq.id = str(i)
        return sequences

    plain, with_drafts = mixed(), mixed()
    serve(plain, None, runner=runner, budget=20)
    serve(with_drafts, Speculator(NgramDrafter(), 3), runner=runner, budget=20)
    for one, other in zip(plain, with_drafts):
        assert other.output_ids == one.output_ids
        assert other.details == one.details
        assert other.prompt_details == one.prompt_details
        assert len(other.details) in (0, len(other.output_ids))
    assert sum(seq.accepted for seq in with_drafts)

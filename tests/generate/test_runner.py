"""The engine computes what the plain model computes, whichever sequences share the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import policies
from generate.params import GREEDY
from generate.runner import ModelRunner
from generate.sampling import NotFinite
from models.gpt2 import GPT
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from serving.recovery import Recovery
from tests.support import points
from tests.support.faults import Faults
from tests.support.generate import SHAPES, Counting, make_model, ragged, run


def chosen(model: GPT, seq: Sequence, answer: list[int]) -> list[int]:
    """Return what the plain model chooses at each place of an answer: the answer itself exactly where it is greedy."""
    ids = torch.tensor([seq.prompt_ids + answer])
    return model(ids, targets=ids)[0][0, len(seq.prompt_ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_are_the_plain_models_under_every_policy(shape: str) -> None:
    config = SHAPES[shape]
    expected = run(make_model(config), ragged(config, 7, 1, temperature=0), "nobatch")
    for seq, answer in zip(ragged(config, 7, 1), expected, strict=True):
        assert len(answer) == seq.max_tokens
        assert chosen(make_model(config), seq, answer) == answer
    assert len({tuple(tokens) for tokens in expected}) > 3
    for policy in ("static", "dynamic"):
        assert run(make_model(config), ragged(config, 7, 1, temperature=0), policy) == expected


@pytest.mark.parametrize("policy", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_failed_steps_and_memory_shortages_change_no_tokens(policy: str, dtype: torch.dtype) -> None:
    config = SHAPES["heads of 64"]
    expected = run(make_model(config, dtype), ragged(config, 12, 3))
    armed = Faults(oom_above={"batch": 3, "after": 9}, fail_once={"after": 5})
    recovery = Recovery(
        armed.model(ModelRunner(make_model(config, dtype), 120, 64), lambda ids: ""),
        lambda: Sequence([0], 1, sampling=GREEDY),
        lambda: 0.0,
    )
    books = Scheduler(policies.get_policy(policy, max_batch_size=8), PagePool(120, 64))
    sequences = ragged(config, 12, 3)
    for seq in sequences:
        books.add(seq)
    while books.step(lambda plan: recovery.compute(books, plan), lambda: 0.0):
        assert not recovery.is_suspect or recovery.probe()
    assert recovery.out_of_memory == {"static": 4, "dynamic": 3}[policy]  # until it is known how many fit
    assert books.batch.slot_cap == 3
    assert any(seq.preemptions for seq in sequences)
    assert [seq.output_ids for seq in sequences] == expected


class Halving(ModelRunner):
    """A runner that computes every fourth step in halves, as recovery does after a failure."""

    def forward(self, plan: Plan) -> list[Output]:
        n = len(plan.sequences)
        if plan.number % 4 or n < 2:
            return super().forward(plan)
        halves = (slice(0, n // 2), slice(n // 2, n))
        parts = [
            replace(plan, sequences=plan.sequences[half], counts=plan.counts[half], held=[], repeats=False)
            for half in halves
        ]
        return [output for part in parts for output in super(Halving, self).forward(part)]


def test_a_step_after_one_in_halves_computes_all_members() -> None:
    config = SHAPES["heads of 64"]
    expected = run(make_model(config), ragged(config, 8, 3), arrivals=8)
    halving = Halving(make_model(config), 120, 64)
    assert run(make_model(config), ragged(config, 8, 3), arrivals=8, runner=halving) == expected


@pytest.mark.parametrize("policy", points(2, "dynamic", "static", "nobatch", "chunked"))
@pytest.mark.parametrize(
    "sampling", points(2, {}, {"logprobs": 2}, {"temperature": 0.0}, {"top_k": 5, "repetition_penalty": 1.3}), ids=str
)
def test_steps_that_only_decode_are_packed_once_and_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, policy: str, sampling: dict[str, Any]
) -> None:
    config = SHAPES["heads of 64"]
    runner = Counting(make_model(config), 120, 64)

    def served() -> tuple[list[list[int]], int]:
        runner.packed = 0
        return run(make_model(config), ragged(config, 12, 4, **sampling), policy, runner=runner), (runner.packed)

    tokens, packed = served()
    with monkeypatch.context() as patched:
        patched.setattr("generate.runner._Decoded.followed_by", lambda self, plan: None)
        expected, steps = served()
    assert tokens == expected
    assert (packed == steps) if "logprobs" in sampling else (packed < 0.8 * steps), (packed, steps)


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    points(2, (torch.bfloat16, 0.0), (torch.float32, 1.0), (torch.float32, 0.0), (torch.bfloat16, 1.0)),
    ids=str,
)
def test_the_text_of_a_request_does_not_depend_on_the_batch(dtype: torch.dtype, temperature: float) -> None:
    config = SHAPES["heads of 64"]
    model = make_model(config, dtype)
    runner = ModelRunner(model, 120, 64)

    def texts(policy: str, **options: int) -> list[list[int]]:
        requests = ragged(config, 16, 2, temperature=temperature)
        return run(model, requests, policy, runner=runner, **options)

    alone = texts("nobatch")
    assert texts("static") == alone
    assert texts("dynamic", slots=16, arrivals=16) == alone
    assert texts("dynamic", budget=16) == alone  # prompts in pieces
    assert texts("dynamic", slots=5, prefix_cache=False) == alone


def test_a_cached_prefix_saves_work_and_changes_no_token() -> None:
    config = SHAPES["heads of 64"]
    prompt = [(7 * i) % 300 for i in range(150)]

    def tokens(prefix_cache: bool) -> tuple[list[list[int]], list[int]]:
        model = make_model(config, torch.bfloat16)
        requests = [Sequence(prompt + [i], 8, id=str(i), sampling=GREEDY) for i in range(3)]
        result = run(model, requests, "nobatch", arrivals=1, prefix_cache=prefix_cache)
        return result, [seq.cached for seq in requests]

    with_cache, cached = tokens(True)
    without, _ = tokens(False)
    assert with_cache == without
    assert cached == [0, 128, 128]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    config = SHAPES["heads of 64"]
    poisoned = config.vocab_size - 1

    def requests() -> list[Sequence]:
        result = ragged(config, 6, 3, temperature=0)
        for seq in result:
            seq.prompt_ids = [token % poisoned for token in seq.prompt_ids]
        return result

    clean = run(make_model(config), requests())
    model = make_model(config)
    wte = model.transformer.wte.weight.clone()
    wte[poisoned] = float("nan")
    model.transformer.wte.weight = torch.nn.Parameter(wte, requires_grad=False)  # not the head's
    bad = Sequence([5, poisoned, 9], 20, id="bad", sampling=GREEDY)
    assert run(model, [*requests(), bad]) == [*clean, []]
    assert isinstance(bad.error, NotFinite)

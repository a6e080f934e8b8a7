"""The embedding of a prompt is that of the plain model, to the bit the same in any batch, in pieces and after preemption."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generate.gpu.runner import GpuRunner
from generate.params import SamplingParams
from generate.runner import ModelRunner
from generate.sampling import NotFinite
from models import weights
from models.sources import catalog
from scheduling.sequence import Sequence
from tests.generate.test_adapters import Served
from tests.generate.test_runner import Halving
from tests.support import points
from tests.support.checkpoints import reference, reference_of, save
from tests.support.generate import SHAPES, make_model, ragged, run

CONFIG = SHAPES["heads of 64"]
DTYPES = points(1, torch.bfloat16, torch.float32)


def embedded(prompts: list[list[int]], pooling: str = "mean") -> list[Sequence]:
    """Return requests for embeddings; a prompt that is summed up matches no cached page."""
    params = SamplingParams(temperature=0, pooling=pooling)
    requests = [Sequence(prompt, 0, id=f"e{i}", sampling=params) for i, prompt in enumerate(prompts)]
    for seq in requests:
        seq.hashes = [seq.id.encode()] if pooling == "mean" else []
    return requests


def prompts(n: int, seed: int = 1, longest: int = 200) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(1, longest))] for _ in range(n)]


def vectors(requests: list[Sequence]) -> list[bytes]:
    return [seq.prompt_details[-1].tobytes() for seq in requests]


def alone(model: Any, asked: list[list[int]], pooling: str) -> list[bytes]:
    requests = embedded(asked, pooling)
    run(model, requests, "nobatch", prefix_cache=False)
    return vectors(requests)


@torch.no_grad()
def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return what the final states (T, C) of a prompt should become."""
    x = states.double()
    x = x.mean(0) if pooling == "mean" else x[-1]
    return (x / x.norm()).float()


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen3"])
def test_embeddings_are_those_of_transformers(shape: str, pooling: str, tmp_path: Path) -> None:
    hf = reference(n_positions=160) if shape == "gpt2" else reference_of(shape)
    runner = ModelRunner(weights.load(catalog.resolve(str(save(tmp_path, hf)))), 120, 64)
    asked = [[token % 211 for token in prompt] for prompt in prompts(5, longest=150)]
    requests = embedded(asked, pooling)
    run(None, requests, budget=64, runner=runner)
    for prompt, seq in zip(asked, requests):
        with torch.no_grad():
            states = hf(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]  # normed
        vector = torch.tensor(seq.prompt_details[-1])
        torch.testing.assert_close(vector, pooled(states, pooling), rtol=1e-4, atol=1e-5)
        assert abs(vector.norm() - 1) < 1e-6


def test_an_embedding_is_that_of_the_merged_model_beside_another_adapter_and_none(tmp_path: Path) -> None:
    served, prompt = Served("llama, 3:1", tmp_path), [7 * i % 211 for i in range(80)]
    first, hf = served.adapter(1)
    requests = embedded([prompt] * 3)
    for seq, adapter in zip(requests, (first, served.adapter(2)[0], None)):
        seq.adapter_weights = adapter
    run(None, requests, budget=50, runner=served.runner)
    with torch.no_grad():
        states = hf(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    found = [torch.tensor(seq.prompt_details[-1]) for seq in requests]
    torch.testing.assert_close(found[0], pooled(states, "mean"), rtol=1e-4, atol=1e-4)
    assert min((found[i] - found[j]).norm() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.01


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_embedding_does_not_depend_on_the_batch_or_the_pieces(dtype: torch.dtype, pooling: str) -> None:
    model, asked = make_model(CONFIG, dtype), prompts(12)
    expected = alone(model, asked, pooling)
    runner = ModelRunner(model, 120, 64)
    for policy, options in (
        ("dynamic", {"slots": 12, "arrivals": 12}), ("static", {}), ("dynamic", {"budget": 7, "slots": 3}),
        ("chunked", {"budget": 33}), ("dynamic", {"pages": 6}),
    ):  # fmt: skip
        requests = embedded(asked, pooling)
        run(None, requests, policy, runner=runner, **options)  # type: ignore[arg-type]
        assert vectors(requests) == expected, (policy, options)
    assert len(set(expected)) == len(asked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_embeddings_and_texts_share_steps_and_change_no_bit_of_each_other(policy: str, dtype: torch.dtype) -> None:
    model, asked = make_model(CONFIG, dtype), prompts(8)
    means, lasts, words = embedded(asked[:4]), embedded(asked[4:], "last"), ragged(CONFIG, 8, 3, logprobs=2)
    scored = ragged(CONFIG, 2, 5, prompt_logprobs=1)
    shown = ragged(CONFIG, 8, 3, logprobs=2)
    run(model, shown, "nobatch")
    together = [*means, *words, *scored, *lasts]
    random.Random(2).shuffle(together)
    run(model, together, policy, slots=7, budget=50)
    assert vectors(means) == alone(model, asked[:4], "mean")
    assert vectors(lasts) == alone(model, asked[4:], "last")
    assert [(seq.output_ids, seq.details) for seq in words] == [(seq.output_ids, seq.details) for seq in shown]
    assert [d.token for seq in scored for d in seq.prompt_details] == [t for seq in scored for t in seq.prompt_ids[1:]]


def test_steps_in_halves_and_preemption_change_no_embedding() -> None:
    asked, words = prompts(8), ragged(CONFIG, 8, 3)
    expected, said = alone(make_model(CONFIG), asked, "mean"), run(make_model(CONFIG), ragged(CONFIG, 8, 3))
    requests = embedded(asked)
    mixed = [seq for pair in zip(words, requests) for seq in pair]
    run(None, mixed, budget=40, runner=Halving(make_model(CONFIG), 120, 64))
    assert (vectors(requests), [seq.output_ids for seq in words]) == (expected, said)

    requests = embedded(asked)
    for seq in requests[::2]:  # as after a shortage of memory in the middle of a prompt
        seq.prompt_details.append(torch.ones(CONFIG.n_embd, dtype=torch.float64))
        seq.computed = 1
        seq.preempt()
    run(make_model(CONFIG), requests)
    assert vectors(requests) == expected


def test_the_last_state_may_follow_a_cached_prefix_and_a_mean_may_not() -> None:
    model, prompt = make_model(CONFIG), [(7 * i) % 300 for i in range(150)]
    first, second, summed = embedded([prompt], "last"), embedded([prompt], "last"), embedded([prompt])
    runner = ModelRunner(model, 120, 64)
    run(None, [*first, *second, *summed], "nobatch", arrivals=1, runner=runner)
    assert [seq.cached for seq in (*first, *second, *summed)] == [0, 128, 0]
    assert vectors(first) == vectors(second)
    assert vectors(summed) == alone(model, [prompt], "mean")


def test_no_logits_are_computed_for_an_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(head: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (rows.append(len(x)), head(x))[1]  # type: ignore[func-returns-value]

    runner = ModelRunner(make_model(CONFIG), 120, 64)
    monkeypatch.setattr(runner, "head", counted(runner.head))
    run(None, embedded(prompts(4)), runner=runner)
    assert rows == []
    gpu = GpuRunner(make_model(CONFIG), 120, 64)
    monkeypatch.setattr(gpu.network.math, "head", lambda *args: rows.append(1))
    run(None, embedded(prompts(4)), runner=gpu)  # type: ignore[arg-type]
    assert rows == []


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_the_gpu_runner_has_the_same_embeddings_and_texts(policy: str) -> None:
    asked = prompts(6)
    words = run(make_model(CONFIG), ragged(CONFIG, 6, 3))
    requests, texts, lasts = embedded(asked), ragged(CONFIG, 6, 3), embedded(asked, "last")
    mixed = [seq for some in zip(requests, texts, lasts) for seq in some]
    run(None, mixed, policy, budget=64, runner=GpuRunner(make_model(CONFIG), 120, 64))  # type: ignore[arg-type]
    assert [seq.output_ids for seq in texts] == words
    for own, pooling in ((requests, "mean"), (lasts, "last")):
        for found, expected in zip(vectors(own), alone(make_model(CONFIG), asked, pooling)):
            np.testing.assert_allclose(np.frombuffer(found, "f"), np.frombuffer(expected, "f"), atol=2e-6)


def test_states_that_are_not_finite_fail_alone() -> None:
    model, asked = make_model(CONFIG), [[1, 2, 3], [5, 300, 9], [4]]
    wte = model.transformer.wte.weight.clone()
    wte[300] = torch.nan
    model.transformer.wte.weight = torch.nn.Parameter(wte, requires_grad=False)
    requests = embedded(asked)
    run(model, requests, budget=2)
    assert [type(seq.error) for seq in requests] == [type(None), NotFinite, type(None)]

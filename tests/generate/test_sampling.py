"""Tokens are drawn from the right distribution, by the right rule, in any row."""

from __future__ import annotations

import math

import pytest
import torch

from generate import sampling
from generate.params import GREEDY, SamplingParams
from generate.sampling import History, NotFinite, logprobs, sample, uniform

NO_SAMPLER = "sampler.c does not compile here: install a C compiler (Debian: apt install gcc)"


@pytest.fixture(params=["c", "torch"])
def any_sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(sampling, "_library", lambda: None)
    elif sampling._library() is None:
        pytest.skip(NO_SAMPLER)
    return str(request.param)


def draws(row: list[float], params: SamplingParams, n: int) -> list[int]:
    logits = torch.tensor([row]).repeat(n, 1)
    tokens = sample(logits, [params] * n, list(range(n)))
    assert all(isinstance(token, int) for token in tokens)
    return [int(token) for token in tokens]  # type: ignore[arg-type]


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(any_sampler: str) -> None:
    logits = torch.tensor([[0.0, 3, 3, 1], [5, 5, 5, 5], [-4, -3, -2, -1]])
    assert sample(logits, [GREEDY] * 3, [1, 2, 3]) == [1, 0, 3]


def test_greedy_finds_every_place_of_a_long_row(any_sampler: str) -> None:
    logits = torch.full((37, 37), -2.0) + torch.eye(37)
    logits[:, 36] += 1
    assert sample(logits, [GREEDY] * 37, [1] * 37) == [*range(37)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(any_sampler: str, temperature: float) -> None:
    row = [1.0, 0.0, -1.0, 2.0, -3.0]
    n = 20_000
    counts = torch.bincount(torch.tensor(draws(row, SamplingParams(temperature=temperature), n)), minlength=5)
    expected = torch.softmax(torch.tensor(row) / temperature, 0)
    assert (counts / n - expected).abs().max() < 5 * 0.5 / math.sqrt(n)


def test_both_samplers_draw_the_same_tokens() -> None:
    if sampling._library() is None:
        pytest.skip(NO_SAMPLER)
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(temperature=0.3 + i % 7 / 4, seed=i * 0x9E3779B97F4A7C15) for i in range(200)]
    drawn = sampling.Draws(params)._draw_plain(logits, torch.arange(200), None)
    original, sampling._library = sampling._library, lambda: None  # type: ignore[assignment]
    try:
        plain = sampling.Draws(params)._draw_plain(logits, torch.arange(200), None)
    finally:
        sampling._library = original  # type: ignore[assignment]
    assert sum(a != b for a, b in zip(drawn, plain)) <= 1  # a sum may round across a border


def test_a_row_of_many_equal_logits_is_drawn_evenly(any_sampler: str) -> None:
    n = 300
    tokens = torch.tensor(draws([0.0] * 50_257, SamplingParams(), n), dtype=torch.float64)
    assert abs(tokens.mean() / 50_257 - 0.5) < 5 * 0.29 / math.sqrt(n)
    assert tokens.max() < 50_257


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_the_row_that_is_not_finite_is_an_error(any_sampler: str, bad: float) -> None:
    logits = torch.tensor([[1.0, 2], [bad, 0], [2, 1]])
    found = sample(logits, [GREEDY] * 3, [0, 0, 0])
    assert found[0] == 1
    assert found[2] == 0
    assert isinstance(found[1], NotFinite) or bad == -math.inf


def test_a_row_draws_the_same_token_alone_and_among_others(any_sampler: str) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(seed=i, top_k=40 * (i % 2), top_p=1 - 0.1 * (i % 3)) for i in range(64)]
    together = sample(logits, params, range(64))
    assert together == [sample(logits[i : i + 1], [params[i]], [i])[0] for i in range(64)]


def test_uniform_numbers_depend_on_seed_and_position_and_fill_the_interval() -> None:
    values = [uniform(seed, position) for seed in range(-50, 50) for position in range(100)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_top_k_keeps_k_tokens_and_top_p_the_one_that_crosses() -> None:
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draws(row, SamplingParams(top_k=2), 200)) == {0, 1}
    assert set(draws(row, SamplingParams(top_p=0.65), 200)) == {0, 1}
    assert set(draws(row, SamplingParams(top_p=0.75), 300)) == {0, 1, 2}
    assert set(draws(row, SamplingParams(top_k=3, top_p=0.5), 300)) == {0, 1}
    assert set(draws(row, SamplingParams(min_p=0.5), 300)) == {0, 1, 2}
    assert set(draws(row, SamplingParams(typical_p=0.2), 300)) == {1}


def test_a_flat_row_keeps_more_than_the_candidates() -> None:
    tokens = draws([0.0] * 2000, SamplingParams(top_p=0.9), 1500)
    assert len(set(tokens)) > 2 * sampling.CANDIDATES


def test_penalties_bias_and_minimum_shape_the_row() -> None:
    row = torch.tensor([[2.0, 1.9, 1.0, -1.0]])
    history = History((0,), (1, 1))

    def best(**options: object) -> object:
        params = SamplingParams(temperature=0, **options)  # type: ignore[arg-type]
        return sampling.Draws([params]).draw(row, torch.tensor([3]), lambda i: history)[0]

    assert best() == 0
    assert best(repetition_penalty=2.5) == 2  # prompt and output both count
    assert best(logit_bias=((3, 50.0),)) == 3
    assert best(min_tokens=3, banned_ids=frozenset({0})) == 1
    assert best(min_tokens=2, banned_ids=frozenset({0})) == 0
    assert best(logit_bias=((0, -100.0),), presence_penalty=0.5) == 1
    assert best(logit_bias=((0, -100.0),), presence_penalty=0.5, frequency_penalty=0.25) == 2


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    expected = torch.log_softmax(logits, 1)
    best = [int(i) for i in logits.argmax(1)]
    found = logprobs(logits, [7, best[1], 9], [2, 1, 0])
    assert found[0].logprob == pytest.approx(float(expected[0, 7]), abs=1e-6)
    assert found[0].top[0][0] == best[0]
    assert len(found[0].top) == 2
    assert found[1].logprob == found[1].top[0][1]
    assert found[2].top == ()
    order = logits.argsort(dim=1, descending=True).tolist()
    assert [d.rank for d in found] == [None] * 3
    found = logprobs(logits, [7, best[1], 9], [2, 1, 0], ranks=True)
    assert [d.rank for d in found] == [order[i].index(d.token) + 1 for i, d in enumerate(found)]

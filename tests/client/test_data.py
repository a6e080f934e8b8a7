"""The workload: what a seed promises, and the three generators of the original."""

import threading

import numpy as np
import pytest

from client.data import BUCKETS, SELECTIONS, Arrivals, PromptData, plan, trace_sha256
from client.workloads.corpus import USUAL_CONTEXT

POISSON = Arrivals("poisson", 1.0)


def lengths(prompts: list[tuple[str, int]]) -> list[int]:
    return [num_tokens for _, num_tokens in prompts]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_same_seed_gives_the_same_run_byte_for_byte(selection: str) -> None:
    runs = [plan(50, None, selection, POISSON, seed=7) for _ in range(2)]
    assert runs[0] == runs[1]
    assert trace_sha256(runs[0]) == trace_sha256(runs[1])
    assert trace_sha256(runs[0]) != trace_sha256(plan(50, None, selection, POISSON, seed=8))


def test_another_rate_sends_the_same_prompts() -> None:
    slow, burst = (plan(20, None, "normal", a, seed=3) for a in (POISSON, Arrivals("burst")))
    assert [(p.prompt, p.num_tokens) for p in slow] == [(p.prompt, p.num_tokens) for p in burst]


def test_a_generator_may_be_passed_in_place_of_a_seed() -> None:
    given = PromptData(5, seed=np.random.default_rng(4)).prompts
    assert given == PromptData(5, seed=4).prompts


def test_normal_lengths_are_cut_to_1_to_200_around_100() -> None:
    prompts = PromptData(3000, seed=1).prompts
    drawn = np.array(lengths(prompts))
    assert 1 <= drawn.min() <= drawn.max() <= 200
    assert drawn.mean() == pytest.approx(100, abs=3)
    assert drawn.std() == pytest.approx(33, abs=2)
    words = {len(prompt.split()) for prompt, _ in prompts}
    assert words == set(range(8, 65))


def test_range_draws_from_the_list_with_prompts_as_long_as_the_answer() -> None:
    prompts = PromptData(60, [10, 20, 40], "range", seed=1).prompts
    assert set(lengths(prompts)) == {10, 20, 40}
    assert all(len(prompt.split()) == num_tokens for prompt, num_tokens in prompts)


def test_buckets_are_5_to_145_ten_times_each_by_default() -> None:
    data = PromptData(1, seed=1)
    data.prompts.clear()
    data.generate_samples_buckets()
    assert sorted(lengths(data.prompts)) == sorted(BUCKETS * 10)
    assert lengths(data.prompts) != sorted(lengths(data.prompts))
    assert len(set(lengths(PromptData(29, selection="buckets", seed=1).prompts))) == 29


def test_descend_puts_the_longest_first_as_the_original_did() -> None:
    drawn = lengths(PromptData(40, [1, 25, 100], "descend", seed=1).prompts)
    assert drawn == sorted(drawn, reverse=True)
    assert set(drawn) == {1, 25, 100}


@pytest.mark.parametrize(("num_tokens", "context"), [(1, 1024), (400, 1024), (1022, 1024), (700, 8192), (8000, 8192)])
def test_prompt_and_answer_fit_the_context_at_two_tokens_a_word(num_tokens: int, context: int) -> None:
    for prompt, tokens in PromptData(5, [num_tokens], "range", seed=1, context=context).prompts:
        assert tokens == num_tokens
        assert 2 * len(prompt.split()) + tokens <= context
        assert prompt.strip()


@pytest.mark.parametrize("wrong", [[], [0], [10, USUAL_CONTEXT - 1]])
def test_lengths_that_cannot_be_served_are_rejected_with_a_remedy(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="Use"):
        PromptData(1, wrong, "range")


def test_an_unknown_selection_is_rejected_with_the_list() -> None:
    with pytest.raises(ValueError, match="normal, buckets, range"):
        PromptData(1, selection="pareto")


def test_samples_are_taken_once_each_from_many_threads_and_then_run_out() -> None:
    data = PromptData(200, seed=1)
    taken: list[tuple[str, int]] = []

    def take() -> None:
        while (sample := data.get_next_sample()) is not None:
            taken.append(sample)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(data.prompts)
    assert data.get_next_sample() is None

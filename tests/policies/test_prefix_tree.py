"""The order prefix-tree: each shared prefix is computed once, whatever the size of the cache."""

from __future__ import annotations

import random

import pytest

import policies
from costs.cost import Affine
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import Run, simulate
from tests.support.scheduling import PAGE, drawn, drive, least, make_scheduler, order_of_admission, requests


def shared(count: int, prefixes: int) -> list[Sequence]:
    """Return shuffled requests with `prefixes` beginnings of 12 pages."""
    return drawn(count, prefixes, tokens=12 * PAGE)


def served(name: str, sequences: list[Sequence], pages: int = 180, slots: int = 16, budget: int = 2048) -> Run:
    """Simulate a burst with a cache of `pages` pages, on a law like that of a small model on two cores."""
    scheduler = Scheduler(policies.get_policy(name, slots), PagePool(pages, PAGE), budget)
    return simulate(scheduler, sequences, Affine(base=0.02, token=0.0008, row=0.0005))


def computed(run: Run) -> int:
    return sum(len(seq.prompt_ids) - seq.cached for seq in run.sequences)


def test_two_thousand_requests_over_forty_prefixes_compute_each_prefix_once() -> None:
    """The cache holds 15 of the prefixes, beside nothing else."""
    tree, plain = (served(name, shared(2000, 40)) for name in ("dynamic+prefix-tree", "dynamic"))
    assert computed(tree) <= 1.02 * least(tree.sequences)
    assert computed(plain) > 5 * least(plain.sequences)
    assert plain.makespan > 1.5 * tree.makespan


@pytest.mark.parametrize(
    ("name", "slots", "pages", "budget"),
    [("chunked", 16, 180, 64), ("tgi", 16, 180, 2048), ("prefill-first", 64, 800, 2048), ("dynamic", 4, 40, 2048)],
)
def test_each_prefix_is_computed_once_by_other_loops_too(name: str, slots: int, pages: int, budget: int) -> None:
    run = served(f"{name}+prefix-tree", shared(200, 20), pages, slots, budget)
    assert computed(run) == least(run.sequences)


def test_prefixes_within_prefixes_are_computed_once() -> None:
    rng = random.Random(2)
    prompts = [[0] * 40 + [i] * 24 + [10 * i + j] * 56 for i in range(3) for j in range(4) for _ in range(8)]
    sequences = [Sequence([*prompt, 99, i], 1 + i % 9, id=f"r{i}") for i, prompt in enumerate(prompts)]
    rng.shuffle(sequences)
    run = served("dynamic+prefix-tree", sequences, pages=40, slots=4)
    assert computed(run) == least(run.sequences)


def test_the_tree_is_walked_depth_first_with_long_answers_early_and_the_longest_branch_last() -> None:
    a, b, c = [1, 1], [2, 2, 2, 2], [3, 3]
    run = drive(
        make_scheduler("dynamic+prefix-tree", 1, PagePool(40, 2)),
        requests((0, [*b, 7], 2), (0, [*a, 7], 2), (0, [*b, 8], 2), (0, [*a, 8], 4), (0, [*c, 9], 12)),
    )
    # Tokens to compute for each to generate: c 3/12, a 4/6, b 6/4. In a, the longer answer goes first.
    assert order_of_admission(run) == ["r4", "r3", "r1", "r0", "r2"]


def test_those_that_share_a_prefix_join_together_and_compute_it_once() -> None:
    a, b = [1] * 4, [2] * 4
    trace = [(0, [*a, 7], 3), (0, [*a, 8], 3), (0, [*b, 7], 3), (0, [*b, 8], 3)]
    run = drive(make_scheduler("dynamic+prefix-tree", 3, PagePool(60, 2)), requests(*trace))
    assert [it.joined for it in run.iterations if it.joined] == [["r0", "r1", "r2"], ["r3"]]
    assert [seq.cached for seq in run.sequences] == [0, 4, 0, 4]


def test_a_request_that_arrives_while_its_prefix_is_computed_shares_it() -> None:
    loop = make_scheduler("chunked+prefix-tree", 4, PagePool(60, 2), max_batched_tokens=4)
    run = drive(loop, requests((0, [1] * 12, 3), (5, [1] * 12, 3)))
    assert [seq.cached for seq in run.sequences] == [0, 10]


@pytest.mark.full
def test_a_prefix_of_prefixes_as_long_as_a_context_is_no_problem() -> None:
    sequences = [Sequence([1] * (i + 2), 1, id=f"r{i}") for i in range(1500)]
    run = drive(make_scheduler("dynamic+prefix-tree", 64, PagePool(4000, 1)), sequences[::-1])
    assert all(seq.finish_reason == "length" for seq in run.sequences)

"""Requests that join in one step compute the head that their prompts share once, whoever of them leaves or fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies import dynamic
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate.laws.contents import Contents
from tests.support.scheduling import Run, add_all, drive, failing, make_scheduler, next_tokens, plan_of

PAGE, HEAD = 4, 20


def burst(count: int, head: int = HEAD, tokens: int = 4) -> list[Sequence]:
    """Return requests that arrive at once, whose prompts differ in their last tokens only."""
    return [Sequence([*range(head), 100 + i, 7], tokens, id=f"r{i}") for i in range(count)]


def computed(run: Run) -> int:
    return sum(n for plan in run.plans for seq, n in zip(plan.sequences, plan.counts) if seq.output_ids == [])


def sound(forward: Callable[[Plan], list[Output]] = next_tokens) -> Callable[[Plan], list[Output]]:
    """Return a model that fails the test where a row reads keys and values of another text than its own."""
    contents = Contents(PAGE)

    def compute(plan: Plan) -> list[Output]:
        outputs = forward(plan)
        for seq, count in zip(plan.sequences, plan.counts):
            assert contents.compute(seq, count), seq.id
        return outputs

    return compute


def counts(run: Run, step: int) -> dict[str, int]:
    return {seq.id: count for seq, count in zip(run.plans[step].sequences, run.plans[step].counts)}


@pytest.mark.parametrize("budget", [2048, 512])
@pytest.mark.parametrize("policy", ["dynamic", "static", "chunked", "prefill-first", "tgi", "econoserve"])
def test_a_burst_of_64_computes_its_head_of_500_tokens_once(policy: str, budget: int) -> None:
    pool, sequences = PagePool(2000, 16), burst(64, 500)
    run = Run(make_scheduler(policy, 64, pool, budget), sequences)
    run.run()
    tails = sum(len(seq.prompt_ids) - 496 for seq in sequences)
    assert sum(len(seq.prompt_ids) - seq.cached for seq in sequences) == 496 + tails
    assert pool.hit_tokens == sum(seq.cached for seq in sequences) == 63 * 496
    assert sum(plan.padding for plan in run.plans) < 600


def test_rows_read_in_the_step_in_which_a_row_before_them_writes() -> None:
    run = drive(make_scheduler("dynamic", 3, PagePool(60, PAGE)), burst(3), forward=sound())
    assert counts(run, 0) == {"r0": 22, "r1": 2, "r2": 2}


def test_who_needs_a_page_that_no_row_computes_in_this_step_waits_for_it() -> None:
    run = drive(make_scheduler("dynamic", 3, PagePool(60, PAGE), budget=16), burst(3), forward=sound())
    assert [counts(run, step) for step in range(3)] == [
        {"r0": 16},
        {"r0": 6, "r1": 2, "r2": 2},
        dict.fromkeys(("r0", "r1", "r2"), 1),
    ]


def test_a_padded_batch_computes_the_rests_in_a_step_of_their_own_where_that_is_less() -> None:
    run = drive(make_scheduler("static", 3, PagePool(60, PAGE)), burst(3), forward=sound())
    assert [counts(run, 0), counts(run, 1)] == [{"r0": 22}, {"r0": 1, "r1": 2, "r2": 2}]
    short = drive(
        make_scheduler("static", 2, PagePool(60, PAGE)), [Sequence([1] * 40, 2), Sequence([1] * 4 + [2] * 36, 2)]
    )
    assert short.plans[0].counts == [40, 36]


@pytest.mark.parametrize("policy", ["dynamic", "static", "chunked"])
@pytest.mark.parametrize("fault", ["leaves", "fails", "finds no memory"])
def test_another_computes_the_head_of_a_writer_that_is_gone(policy: str, fault: str) -> None:
    options = {"max_batched_tokens": 12} if policy == "chunked" else {}
    pool, sequences = PagePool(60, PAGE), burst(4)
    run = Run(
        make_scheduler(policy, 4, pool, **options), sequences,
        forward=sound(failing({1: [0], 2: [0]} if fault == "fails" else {})),
        cancel={1: [0]} if fault == "leaves" else None, preempt=[1, 2] if fault == "finds no memory" else (),
    )  # fmt: skip
    run.run()
    assert [s.finish_reason for s in sequences[2:]] == ["length"] * 2
    assert pool.used == 0
    assert not pool.writers


def test_a_reader_that_is_preempted_while_it_waits_has_nothing_to_recompute() -> None:
    scheduler, (writer, reader) = make_scheduler("dynamic", 2, PagePool(60, PAGE), budget=8), burst(2)
    add_all(scheduler, (writer, reader))
    for now in range(2):  # 16 of the head's 20 tokens
        plan = plan_of(scheduler, now)
        assert reader.computed == HEAD
        scheduler.commit(plan, next_tokens(plan), now + 1)
    scheduler.preempt(plan, [reader], 2)
    assert reader.recompute_until == 2 * 8


def test_rows_that_have_read_the_pages_of_one_that_fails_go_on() -> None:
    run = drive(make_scheduler("dynamic", 3, PagePool(60, PAGE)), burst(3), forward=sound(failing({1: [0]})))
    assert counts(run, 1) == {"r1": 1, "r2": 1}


def test_a_policy_that_leaves_out_who_computes_the_head_stops_nobody() -> None:
    class Shortest(dynamic.Policy):
        def allocate_tokens(self, running: list[Sequence], token_budget: int) -> list[int]:
            least = min(seq.pending for seq in running)
            return [seq.pending if seq.pending == least else 0 for seq in running]

    run = drive(Scheduler(Shortest(3), PagePool(60, PAGE)), burst(3), forward=sound())
    assert counts(run, 0) == {"r0": 22}


def test_only_pages_with_the_same_salt_and_only_before_pinning_are_shared() -> None:
    first, second = burst(2)
    second.cache_salt = "adapter"
    drive(make_scheduler("dynamic", 2, PagePool(60, PAGE)), [first, second], forward=sound())
    assert second.cached == 0
    pool = PagePool(60, PAGE)
    pool.pin([list(range(9))], 1, 30)
    pinned = burst(2)
    scheduler = make_scheduler("dynamic", 2, pool)
    add_all(scheduler, pinned)
    assert scheduler.plan(0) is not None
    assert [seq.cached for seq in pinned] == [PAGE, PAGE]


def test_a_step_that_is_tried_again_leaves_out_the_rows_that_read_others() -> None:
    scheduler, sequences = make_scheduler("dynamic", 3, PagePool(60, PAGE)), burst(3)
    add_all(scheduler, sequences)
    plan = plan_of(scheduler, 0)
    assert plan.readers == sequences[1:]
    plan.stand_alone()
    assert (plan.sequences, plan.paused) == (sequences[:1], sequences[1:])
    scheduler.commit(plan, [RuntimeError("its own fault")], 1)
    after = plan_of(scheduler, 1)
    assert (after.counts, [seq.cached for seq in sequences[1:]]) == ([22, 2], [0, 20])

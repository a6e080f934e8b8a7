"""Steps, failures, preemptions and records of the scheduler, one case each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

import policies
from scheduling.fast_forward import admission_closed, identical_steps_ahead
from scheduling.iteration import Experts, Plan, SlotSteps
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, PolicyError, Scheduler
from scheduling.sequence import Sequence
from scheduling.stretches import Stretches
from tests.support.scheduling import add_all, drive, failing, make_scheduler, next_tokens, plan_of, requests

slots = st.integers(1, 5)


def test_a_long_prompt_is_cut_to_the_budget_beside_a_decode() -> None:
    run = drive(make_scheduler("dynamic", 2, budget=4), requests((0, 2, 5), (1, 10, 1)))
    assert [plan.counts for plan in run.plans] == [[2], [1, 3], [1, 3], [1, 3], [1, 1]]
    assert [m.phase for m in run.iterations[4].members] == ["decode", "prefill"]
    computed = [m.computed for it in run.iterations for m in it.members if m.id == "r1"]
    assert computed == [3, 6, 9, 10]


def test_a_budget_below_the_batch_size_is_raised_to_it() -> None:
    run = drive(make_scheduler("dynamic", 3, budget=1), requests((0, 1, 3), (0, 5, 1)))
    assert [plan.counts for plan in run.plans] == [[1, 2], [1, 2], [1, 1]]


def test_held_members_leave_with_the_last_live_one_that_is_cancelled() -> None:
    run = drive(make_scheduler("static", 3), requests((0, 3, 1), (0, 3, 2), (0, 3, 9)), cancel={3: [2]})
    assert [s.finish_reason for s in run.sequences] == ["length", "length", "abort"]
    assert len(run.iterations) == 3
    assert {s.finished_at for s in run.sequences} == {run.now}


def test_a_second_removal_does_nothing() -> None:
    loop = make_scheduler("dynamic", 2)
    (seq,) = requests((0, 3, 2))
    loop.add(seq)
    assert loop.remove_all([seq], 1) == [seq]
    assert loop.remove_all([seq], 2, "again") == []
    assert (seq.finished_at, seq.finish_reason) == (1, "abort")


def test_a_stop_ends_its_sequence_and_one_that_raises_fails_it_alone() -> None:
    stopping, broken, plain = sequences = requests((0, 3, 9), (0, 3, 9), (0, 3, 4))
    stopping.stop = lambda token: "stop" if token == 1 else None
    broken.stop = lambda token: {}[token]
    run = drive(make_scheduler("dynamic", 3), sequences)
    assert (stopping.finish_reason, stopping.output_ids) == ("stop", [0, 1])
    assert (broken.finish_reason, type(broken.error)) == ("abort", KeyError)
    assert (plain.finish_reason, plain.output_ids) == ("length", [0, 1, 2, 3])
    assert run.iterations[0].left == [("r1", "abort")]


def test_a_missing_token_fails_its_row_alone() -> None:
    def forward(plan: Plan) -> list[Output]:
        return [None if s.id == "r0" else 5 for s in plan.sequences]

    silent, other = requests((0, 3, 2), (0, 3, 1))
    drive_one = make_scheduler("dynamic", 2)
    add_all(drive_one, (silent, other))
    drive_one.step(forward, lambda: 0.0)
    assert (silent.state, silent.finish_reason) == ("finished", "abort")
    assert (other.state, other.finish_reason) == ("finished", "length")


def test_a_step_that_was_not_committed_can_be_tried_again() -> None:
    loop = make_scheduler("dynamic", 2, PagePool(9, 4))
    (seq,) = requests((0, 6, 2))
    loop.add(seq)
    lost, again = plan_of(loop, 0), plan_of(loop, 1)
    assert (again.sequences, again.counts) == (lost.sequences, lost.counts)
    assert (seq.computed, seq.output_ids) == (0, [])


def test_preempted_requests_join_first_again_and_keep_their_tokens() -> None:
    made = make_scheduler("dynamic", 4, PagePool(40, 4))
    sequences = requests((0, 3, 5), (0, 3, 5), (0, 3, 5), (9, 3, 5))
    add_all(made, sequences)
    made.step(next_tokens, lambda: 10)
    plan = plan_of(made, 11)
    made.preempt(plan, sequences[2:], 11)
    made.batch.slot_cap = 2
    record = made.commit(plan, next_tokens(plan), 12)
    assert (plan.sequences, list(made.waiting)) == (sequences[:2], sequences[2:])
    assert record.preempted == ["r2", "r3"]
    assert [len(seq.pages) for seq in sequences] == [2, 2, 0, 0]
    while made.step(next_tokens, lambda: 13):
        assert len(made.running) <= 2
    assert [seq.output_ids for seq in sequences] == [list(range(5))] * 4
    assert [(seq.preemptions, seq.recompute_until) for seq in sequences] == [(0, 0)] * 2 + [(1, 3)] * 2


def test_a_request_that_is_preempted_in_the_step_of_its_admission_has_not_joined() -> None:
    made = make_scheduler("dynamic", 4)
    add_all(made, requests((0, 3, 5), (0, 3, 5)))
    plan = plan_of(made, 1)
    made.preempt(plan, plan.sequences[1:], 1)
    record = made.commit(plan, next_tokens(plan), 2)
    assert (record.joined, record.preempted, record.queue) == (["r0"], [], 1)


def test_a_shared_prefix_is_computed_once() -> None:
    pool = PagePool(20, 4)
    prompt = list(range(9))
    run = drive(make_scheduler("nobatch", 1, pool), requests((0, prompt, 2), (0, prompt, 2)))
    assert [s.cached for s in run.sequences] == [0, 8]
    assert [plan.counts for plan in run.plans] == [[9], [1], [1], [1]]
    assert (pool.query_tokens, pool.hit_tokens) == (18, 8)


def test_a_row_that_failed_publishes_no_pages() -> None:
    pool = PagePool(20, 4)
    drive(make_scheduler("dynamic", 1, pool), requests((0, 9, 2)), forward=failing({1: [0]}))
    assert pool.cached == 0


def test_a_row_that_fails_leaves_a_static_batch_at_once() -> None:
    run = drive(make_scheduler("static", 2), requests((0, 9, 9), (0, 9, 9)), forward=failing({2: [1]}))
    assert run.iterations[1].left == [("r1", "abort")]
    assert [it.batch_size for it in run.iterations] == [2, 2] + [1] * 7


def test_a_prompt_that_is_half_computed_shares_all_its_pages() -> None:
    pool = PagePool(20, 2)
    run = drive(make_scheduler("dynamic", 2, pool, budget=4), requests((0, 12, 1), (5, 12, 1)))
    assert [s.cached for s in run.sequences] == [0, 10]
    assert pool.cached_tokens(pool.hashes(list(range(12)))) == 10


def test_the_record_has_phases_batch_sizes_and_waste() -> None:
    run = drive(make_scheduler("static", 4), requests((0, 6, 1), (0, 3, 2)))
    first, second = (it.to_dict() for it in run.iterations)
    assert [m["phase"] for m in first["members"]] == ["prefill", "prefill"]
    assert [m["phase"] for m in second["members"]] == ["decode", "held"]
    assert first["slot_steps"] == SlotSteps(1.5, 0.5, 0, 2, 0.0, 0.0)._asdict()
    assert second["slot_steps"] == SlotSteps(1, 0, 1, 2, 0.0, 0.0)._asdict()
    assert second["left"] == [{"id": "r0", "reason": "length"}, {"id": "r1", "reason": "length"}]
    assert [(s.batch_max, s.iterations) for s in run.sequences] == [(2, 1), (2, 2)]


def test_in_a_padded_row_only_the_computed_part_is_recomputed() -> None:
    """Two requests are preempted after their prompts of 2 and 8, and compute 3 and 9 tokens in rows of 9."""
    run = drive(make_scheduler("static", 4), requests((0, 2, 2), (0, 2, 2), (0, 2, 2), (0, 8, 2)), preempt={2})
    again = next(it.slot_steps for it in run.iterations if it.slot_steps.recomputed)
    assert again == pytest.approx((2 / 9, 6 / 9, 0, 2, 10 / 9, 0))


@pytest.mark.parametrize(
    ("hook", "answer", "words"),
    [
        ("order", lambda waiting, now: list(waiting) * 2, "order: r0 is running"),
        ("allocate_tokens", lambda running, budget: [9, 9], "allocate_tokens: 2 numbers for 1 running"),
        ("allocate_tokens", lambda running, budget: [9], "allocate_tokens: 9 tokens for r0, which has 2"),
        ("allocate_tokens", lambda running, budget: [0], "allocate_tokens: no running request"),
        ("release", lambda running: list(running), "release: r0 "),
        ("preempt", lambda waiting, running, budget, now: running * 2, "r0, r0: one of them twice"),
    ],
)
def test_the_error_for_an_impossible_decision_names_the_hook(hook: str, answer: Callable, words: str) -> None:
    mine = type("Mine", (Policy,), {hook: lambda self, *args: answer(*args)})(2)
    mine.admit = lambda waiting, running, budget, now: budget.slots
    loop = Scheduler(mine)
    loop.add(requests((0, 2, 3))[0])

    def run() -> None:
        for _ in range(2):
            loop.step(next_tokens, lambda: 0.0)

    with pytest.raises(PolicyError, match=words):
        run()


def test_a_hook_reads_those_that_wait_as_a_list_and_cannot_change_them() -> None:
    class Mine(Policy):
        def order(self, waiting: Any, now: float) -> Any:
            first, *_, last = all_ = list(waiting)
            assert (len(waiting), waiting[0], waiting[-1], waiting[1:]) == (len(all_), first, last, all_[1:])
            assert last in waiting
            assert (waiting.index(last), str(waiting)) == (len(all_) - 1, str(all_))
            for change in (
                lambda: waiting.sort(), lambda: waiting.pop(), lambda: waiting.clear(),
                lambda: waiting.__setitem__(0, last), lambda: waiting.__delitem__(first),
            ):  # fmt: skip
                with pytest.raises(TypeError, match=r"Use sorted\(waiting"):
                    change()
            return sorted(waiting, key=lambda seq: -seq.arrived_at)

    scheduler = Scheduler(Mine(1))
    add_all(scheduler, requests((0, 1, 1), (1, 1, 1), (2, 1, 1)))
    assert [seq.id for seq in scheduler.queue.in_order(scheduler.policy, [], [], 0.0)] == ["r2", "r1", "r0"]


def test_without_records_of_members_everything_else_is_the_same() -> None:
    runs = []
    for record in (True, False):
        loop = Scheduler(policies.get_policy("dynamic", 3), None, 5, record=record)
        sequences = requests((0, 6, 3), (2, 3, 5), (30, 7, 2), (31, 2, 9))
        while True:
            todo = [s for s in sequences if s.state == "waiting" and s not in loop.waiting]
            if not todo and loop.is_idle:
                break
            add_all(loop, todo)
            loop.step(next_tokens, lambda loop=loop: 10.0 * loop.number)
        runs.append([(s.finished_at, s.first_token_at, s.waited, s.batch_sum) for s in sequences])
    assert runs[0] == runs[1]


def test_identical_steps_ahead_are_as_many_as_no_request_leaves_or_joins_in() -> None:
    loop = make_scheduler("dynamic", 2)
    first, second, third = requests((0, 2, 6), (0, 2, 9), (0, 2, 1))
    add_all(loop, (first, second))
    plans = []
    for _ in range(3):
        plan = plan_of(loop, 0)
        plans.append(identical_steps_ahead(loop, plan))
        loop.commit(plan, next_tokens(plan), 1)
    assert plans == [1, 5, 4]
    assert admission_closed(loop)
    loop.add(third)
    plan = plan_of(loop, 1)
    assert identical_steps_ahead(loop, plan) == 3  # no slot is free, so the third changes nothing
    loop.switch(policies.get_policy("dynamic", 3), 1)
    assert not admission_closed(loop)
    assert identical_steps_ahead(loop, plan) == 1


def test_thousands_of_rows_leave_one_step_together() -> None:
    loop = make_scheduler("dynamic", 5_000)
    run = drive(loop, [Sequence([1], 2, id=str(i)) for i in range(5_000)])
    assert len(run.iterations) == 2


def test_a_record_has_the_time_that_the_step_waited_for_masks_and_the_experts_that_it_read() -> None:
    waits = iter([0.0, 0.25, 0.5, 0.0])

    def forward(plan: Plan) -> list[Output]:
        plan.mask_seconds = next(waits)
        plan.experts = Experts(int(8 * plan.mask_seconds), 8) if plan.mask_seconds else None
        return next_tokens(plan)

    run = drive(make_scheduler("dynamic", 1), requests((0, 3, 4)), forward=forward)
    assert [record.get("mask_seconds") for record in run.records()] == [None, 0.25, 0.5, None]
    stretches = Stretches()
    for iteration in run.iterations:
        stretches.add(iteration)
    prefill, decodes = (stretch.to_dict() for stretch in stretches.kept)
    assert "mask_seconds" not in prefill
    assert decodes["mask_seconds"] * decodes["repeat"] == 0.75
    assert decodes["experts"] == {"read": 2.0, "of": 8}

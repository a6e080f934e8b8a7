"""What every policy keeps (SCHEDULING.md, section 4), faults in between, the budget, and why who waited.

`driver.drive` checks conservation, slots, pages, tokens and waiting times of every run after every step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driver import Request, drive, next_tokens, pools, requests, scheduler, toy_cost, traces
from hypothesis import given
from hypothesis import strategies as st

from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence

Pool = Callable[[], PagePool | None]
ALL = ["nobatch", "static", "dynamic"]

every_policy = pytest.mark.parametrize("policy", ALL)
slots = st.integers(1, 5)
budgets = st.integers(1, 12)
faults = st.dictionaries(st.integers(0, 25), st.lists(st.integers(0, 9), max_size=3), max_size=8)


def failing(rows: dict[int, list[int]]) -> Callable[[Plan], list[Output]]:
    """Return a model whose given rows of given steps are failures."""

    def forward(plan: Plan) -> list[Output]:
        outputs = next_tokens(plan)
        for index in rows.get(plan.number, []):
            outputs[index % len(outputs)] = RuntimeError("this row's own fault")
        return outputs

    return forward


@every_policy
@given(traces(), slots, pools(), budgets)
def test_everybody_gets_exactly_their_tokens(
    policy: str, trace: list[Request], slots: int, pool: Pool, budget: int
) -> None:
    run = drive(scheduler(policy, slots, pool(), budget), requests(*trace))
    assert [s.finish_reason for s in run.sequences] == ["length"] * len(trace)
    assert sorted(id for it in run.iterations for id, _ in it.left) == sorted(
        s.id for s in run.sequences
    )


@every_policy
@given(traces(), slots, pools(), budgets, faults, faults)
def test_nobody_is_lost_when_rows_fail_and_callers_go(
    policy: str,
    trace: list[Request],
    slots: int,
    pool: Pool,
    budget: int,
    cancel: dict[int, list[int]],
    fail: dict[int, list[int]],
) -> None:
    run = drive(
        scheduler(policy, slots, pool(), budget),
        requests(*trace),
        forward=failing(fail),
        cancel=cancel,
    )
    for seq in run.sequences:
        assert seq.finish_reason in ("length", "abort")
        assert seq.output_ids == list(range(len(seq.output_ids)))
        assert seq.error is None or seq.finish_reason == "abort"


@every_policy
@given(traces(), slots, pools(), budgets, faults, faults)
def test_the_same_input_gives_the_same_records(
    policy: str,
    trace: list[Request],
    slots: int,
    pool: Pool,
    budget: int,
    cancel: dict[int, list[int]],
    fail: dict[int, list[int]],
) -> None:
    first, second = (
        drive(
            scheduler(policy, slots, pool(), budget),
            requests(*trace),
            forward=failing(fail),
            cancel=cancel,
        )
        for _ in range(2)
    )
    assert first.records() == second.records()


@every_policy
@given(traces(), slots, pools(), faults)
def test_littles_law_holds_between_records_and_latencies(
    policy: str, trace: list[Request], slots: int, pool: Pool, cancel: dict[int, list[int]]
) -> None:
    run = drive(scheduler(policy, slots, pool()), requests(*trace), cancel=cancel)
    area, inside, before = 0, 0, 0
    for at, change in sorted(run.events):
        area += inside * (at - before)
        inside, before = inside + change, at
    assert inside == 0
    assert area == sum(s.finished_at - s.arrived_at for s in run.sequences)


@every_policy
@given(traces(), slots)
def test_half_the_costs_and_gaps_are_half_the_latencies(
    policy: str, trace: list[Request], slots: int
) -> None:
    double = [(2 * arrival, prompt, output) for arrival, prompt, output in trace]
    half = drive(scheduler(policy, slots), requests(*trace))
    whole = drive(scheduler(policy, slots), requests(*double), cost=lambda plan: 2 * toy_cost(plan))
    assert [2 * s.finished_at for s in half.sequences] == [s.finished_at for s in whole.sequences]


@given(traces(), slots, budgets, pools())
def test_a_step_stays_within_its_budget_and_leaves_no_decode_out(
    trace: list[Request], slots: int, budget: int, pool: Pool
) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        assert sum(plan.counts) <= max(budget, slots)
        decoding = [s for s in scheduler.running if s.output_ids]
        assert all(s in plan.sequences for s in decoding)
        left_out = sum(s.pending for s in scheduler.running) - sum(plan.counts)
        assert left_out == 0 or sum(plan.counts) == max(budget, slots)

    drive(scheduler("dynamic", slots, pool(), budget), requests(*trace), planned=planned)


def test_a_long_prompt_is_cut_to_the_budget_beside_a_decode() -> None:
    run = drive(scheduler("dynamic", 2, budget=4), requests((0, 2, 5), (1, 10, 1)))
    assert [plan.counts for plan in run.plans] == [[2], [1, 3], [1, 3], [1, 3], [1, 1]]
    assert [m.phase for m in run.iterations[4].members] == ["decode", "prefill"]
    computed = [m.computed for it in run.iterations for m in it.members if m.id == "r1"]
    assert computed == [3, 6, 9, 10]


def test_a_budget_below_the_batch_size_is_raised_to_it() -> None:
    run = drive(scheduler("dynamic", 3, budget=1), requests((0, 1, 3), (0, 5, 1)))
    assert [plan.counts for plan in run.plans] == [[1, 2], [1, 2], [1, 1]]


def test_who_waits_for_a_slot_is_told_so() -> None:
    run = drive(scheduler("nobatch", 1), requests((0, 4, 3), (5, 8, 1), (6, 2, 5)))
    # r1 comes during step 1 (0..14), at whose end it learns that the slot is taken, until 38
    assert run.sequences[0].waited == {}
    assert run.sequences[1].waited == {"policy_order": (1, 9), "slots_full": (2, 24)}
    assert run.sequences[2].waited == {"policy_order": (1, 8), "slots_full": (3, 42)}


def test_who_waits_for_pages_is_told_so() -> None:
    pool = PagePool(3, 4)  # two pages: room for 8 tokens
    run = drive(scheduler("dynamic", 4, pool), requests((0, 4, 4), (0, 4, 1)))
    assert run.sequences[1].waited == {"kv_full": (4, run.sequences[0].finished_at)}


def test_who_waits_for_the_end_of_a_static_batch_is_told_so() -> None:
    run = drive(scheduler("static", 2), requests((0, 4, 3), (5, 8, 1)))
    assert run.sequences[1].waited == {"policy_order": (3, 33)}


def test_who_waited_and_was_cancelled_is_told_too() -> None:
    run = drive(scheduler("nobatch", 1), requests((0, 4, 3), (0, 4, 3)), cancel={2: [0]})
    assert run.sequences[1].finish_reason == "abort"
    assert run.sequences[1].waited == {"slots_full": (2, 26)}


def test_who_arrived_before_the_last_plan_but_was_handed_over_after_it_waited_as_long() -> None:
    loop = scheduler("nobatch", 1)
    running, late = requests((0, 4, 3), (9, 4, 1))
    loop.add(running)
    plan = loop.plan(10)
    assert plan is not None
    loop.add(late)
    loop.commit(plan, next_tokens(plan), 20)
    loop.remove(running, 20)
    assert loop.plan(25) is not None
    assert late.scheduled_at == 25
    assert sum(seconds for _, seconds in late.waited.values()) == 16


def test_who_comes_when_the_queue_was_just_emptied_inherits_no_reason() -> None:
    loop = scheduler("nobatch", 1)
    running, gone, late = requests((0, 4, 3), (0, 4, 1), (12, 4, 1))
    loop.add(running)
    loop.add(gone)
    plan = loop.plan(0)
    assert plan is not None
    loop.commit(plan, next_tokens(plan), 14)
    loop.remove(gone, 14)
    loop.add(late)
    assert loop.plan(14) is not None
    loop.remove(late, 20)
    assert late.waited == {"policy_order": (0, 2), "slots_full": (1, 6)}


def test_who_waits_for_a_deadline_of_the_policy_is_told_so_and_the_loop_when_to_wake() -> None:
    class Window(Policy):
        def admit(self, waiting, running, room, now):
            return len(waiting) if now >= 50 else 0

        def deadline(self, waiting, now):
            return 50.0

    loop = Scheduler(Window(max_batch_size=2))
    (seq,) = requests((10, 4, 1))
    assert loop.wake_at(0) is None
    loop.add(seq)
    assert loop.plan(10) is None
    assert loop.wake_at(10) == 50
    assert loop.plan(50) is not None
    assert seq.waited == {"window": (0, 40)}


def test_held_members_leave_with_the_last_live_one_that_is_cancelled() -> None:
    run = drive(scheduler("static", 3), requests((0, 3, 1), (0, 3, 2), (0, 3, 9)), cancel={3: [2]})
    assert [s.finish_reason for s in run.sequences] == ["length", "length", "abort"]
    assert len(run.iterations) == 3
    assert {s.finished_at for s in run.sequences} == {run.now}


def test_a_second_removal_does_nothing() -> None:
    loop = scheduler("dynamic", 2)
    (seq,) = requests((0, 3, 2))
    loop.add(seq)
    assert loop.remove(seq, 1) == [seq]
    assert loop.remove(seq, 2, "again") == []
    assert (seq.finished_at, seq.finish_reason) == (1, "abort")


def test_a_stop_that_says_so_ends_its_sequence_and_one_that_raises_fails_it_alone() -> None:
    stopping, broken, plain = sequences = requests((0, 3, 9), (0, 3, 9), (0, 3, 4))
    stopping.stop = lambda token: "stop" if token == 1 else None
    broken.stop = lambda token: {}[token]
    run = drive(scheduler("dynamic", 3), sequences)
    assert (stopping.finish_reason, stopping.output_ids) == ("stop", [0, 1])
    assert (broken.finish_reason, type(broken.error)) == ("abort", KeyError)
    assert (plain.finish_reason, plain.output_ids) == ("length", [0, 1, 2, 3])
    assert run.iterations[0].left == [("r1", "abort")]


def test_a_model_that_withholds_a_token_that_is_due_fails_that_row_alone() -> None:
    def forward(plan: Plan) -> list[Output]:
        return [None if s.id == "r0" else 5 for s in plan.sequences]

    silent, other = requests((0, 3, 2), (0, 3, 1))
    drive_one = scheduler("dynamic", 2)
    for seq in (silent, other):
        drive_one.add(seq)
    drive_one.step(forward, lambda: 0.0)
    assert (silent.state, silent.finish_reason) == ("finished", "abort")
    assert (other.state, other.finish_reason) == ("finished", "length")


def test_a_step_that_was_not_committed_can_be_tried_again() -> None:
    loop = scheduler("dynamic", 2, PagePool(9, 4))
    (seq,) = requests((0, 6, 2))
    loop.add(seq)
    lost = loop.plan(0)
    again = loop.plan(1)
    assert lost is not None
    assert again is not None
    assert (again.sequences, again.counts) == (lost.sequences, lost.counts)
    assert (seq.computed, seq.output_ids) == (0, [])


def test_a_shared_prefix_is_computed_once() -> None:
    pool = PagePool(20, 4)
    prompt = list(range(9))
    run = drive(scheduler("nobatch", 1, pool), requests((0, prompt, 2), (0, prompt, 2)))
    assert [s.cached for s in run.sequences] == [0, 8]
    assert [plan.counts for plan in run.plans] == [[9], [1], [1], [1]]
    assert (pool.query_tokens, pool.hit_tokens) == (18, 8)


def test_a_row_that_failed_publishes_no_pages() -> None:
    pool = PagePool(20, 4)
    drive(scheduler("dynamic", 1, pool), requests((0, 9, 2)), forward=failing({1: [0]}))
    assert pool.cached == 0


def test_a_row_that_fails_leaves_a_static_batch_at_once() -> None:
    run = drive(scheduler("static", 2), requests((0, 9, 9), (0, 9, 9)), forward=failing({2: [1]}))
    assert run.iterations[1].left == [("r1", "abort")]
    assert [it.batch_size for it in run.iterations] == [2, 2] + [1] * 7


def test_a_prompt_that_is_half_computed_shares_nothing_yet() -> None:
    pool = PagePool(20, 2)
    run = drive(scheduler("dynamic", 2, pool, budget=4), requests((0, 12, 1), (5, 12, 1)))
    assert [s.cached for s in run.sequences] == [0, 0]
    assert pool.cached_tokens(pool.hashes(list(range(12)))) == 10


def test_the_record_tells_phase_company_and_waste() -> None:
    run = drive(scheduler("static", 4), requests((0, 6, 1), (0, 3, 2)))
    first, second = (it.to_dict() for it in run.iterations)
    assert [m["phase"] for m in first["members"]] == ["prefill", "prefill"]
    assert [m["phase"] for m in second["members"]] == ["decode", "held"]
    assert first["slot_steps"] == {
        "useful": 1.5,
        "padding": 0.5,
        "held": 0,
        "idle": 2,
        "recomputed": 0.0,
    }
    assert second["slot_steps"] == {
        "useful": 1,
        "padding": 0,
        "held": 1,
        "idle": 2,
        "recomputed": 0.0,
    }
    assert second["left"] == [{"id": "r0", "reason": "length"}, {"id": "r1", "reason": "length"}]
    assert [(s.batch_max, s.iterations) for s in run.sequences] == [(2, 1), (2, 2)]


def test_thousands_wait_without_being_looked_through() -> None:
    """Count what the policy is shown of the queue, instead of taking time."""
    looked_at = 0
    loop = scheduler("dynamic", 4)

    def order(waiting, now):
        nonlocal looked_at
        for seq in waiting:
            looked_at += 1
            yield seq

    loop.policy.order = order  # type: ignore[method-assign]
    drive(loop, [Sequence([1], 1, id=str(i)) for i in range(2000)])
    assert looked_at == 2000

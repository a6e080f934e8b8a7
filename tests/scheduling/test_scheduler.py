"""What every policy keeps, faults in between, the budget, and why who waited.

`driver.drive` checks conservation, slots, pages, tokens and waiting times of every run after every step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driver import Request, drive, next_tokens, pools, requests, scheduler, toy_cost, traces
from hypothesis import given
from hypothesis import strategies as st

import policies
from scheduling.fast_forward import admission_closed, identical_steps_ahead
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, PolicyError, Scheduler
from scheduling.sequence import Sequence

Pool = Callable[[], PagePool | None]
ALL = ["nobatch", "static", "dynamic"]
MORE = ["static-exact", "impatient", "elastic", "window", "multibin", "bucket", "static-global", "chunked",
        "prefill-first", "tgi", "lightllm", "adaptive", "dynamic+srpt", "dynamic+mlfq", "dynamic+vtc-pred"]  # fmt: skip

every_policy = pytest.mark.parametrize("policy", ALL)
slots = st.integers(1, 5)
budgets = st.integers(1, 12)
faults = st.dictionaries(st.integers(0, 25), st.lists(st.integers(0, 9), max_size=3), max_size=8)


def failing(rows: dict[int, list[int]]) -> Callable[[Plan], list[Output]]:
    """Return a model whose given rows of given steps are failures."""

    def forward(plan: Plan) -> list[Output]:
        outputs = next_tokens(plan)
        for index in rows.get(plan.number, []) if outputs else ():
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
    assert sorted(id for it in run.iterations for id, _ in it.left) == sorted(s.id for s in run.sequences)


@pytest.mark.parametrize("policy", [*ALL, *MORE])
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
    run = drive(scheduler(policy, slots, pool(), budget), requests(*trace), forward=failing(fail), cancel=cancel)
    for seq in run.sequences:
        assert seq.finish_reason in ("length", "abort")
        assert seq.output_ids == list(range(len(seq.output_ids)))
        assert seq.error is None or seq.finish_reason == "abort"


@pytest.mark.parametrize("policy", [*ALL, *MORE])
@given(traces(), slots, pools(), budgets, st.sets(st.integers(1, 25), max_size=5), faults)
def test_a_preempted_request_gets_exactly_its_tokens(
    policy: str,
    trace: list[Request],
    slots: int,
    pool: Pool,
    budget: int,
    out_of_memory: set[int],
    cancel: dict[int, list[int]],
) -> None:
    made = scheduler(policy, slots, pool(), budget)
    run = drive(made, requests(*trace), preempt=out_of_memory, cancel=cancel)
    for seq in run.sequences:
        assert seq.finish_reason == "length" or any(cancel.values())
        assert seq.output_ids == list(range(len(seq.output_ids)))


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
        drive(scheduler(policy, slots, pool(), budget), requests(*trace), forward=failing(fail), cancel=cancel)
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
def test_half_the_costs_and_gaps_are_half_the_latencies(policy: str, trace: list[Request], slots: int) -> None:
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
    loop.remove_all([running], 20)
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
    loop.remove_all([gone], 14)
    loop.add(late)
    assert loop.plan(14) is not None
    loop.remove_all([late], 20)
    assert late.waited == {"policy_order": (0, 2), "slots_full": (1, 6)}


def test_who_waits_for_a_deadline_of_the_policy_is_told_so_and_the_loop_when_to_wake() -> None:
    class Window(Policy):
        def admit(self, waiting, running, budget, now):
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
    assert loop.remove_all([seq], 1) == [seq]
    assert loop.remove_all([seq], 2, "again") == []
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


def test_preempted_requests_join_first_again_and_keep_their_tokens() -> None:
    made = scheduler("dynamic", 4, PagePool(40, 4))
    sequences = requests((0, 3, 5), (0, 3, 5), (0, 3, 5), (9, 3, 5))
    for seq in sequences:
        made.add(seq)
    made.step(next_tokens, lambda: 10)
    plan = made.plan(11)
    assert plan is not None
    made.preempt(plan, sequences[2:], 11)
    made.slot_cap = 2
    record = made.commit(plan, next_tokens(plan), 12)
    assert (plan.sequences, list(made.waiting)) == (sequences[:2], sequences[2:])
    assert record.preempted == ["r2", "r3"]
    assert [len(seq.pages) for seq in sequences] == [2, 2, 0, 0]
    while made.step(next_tokens, lambda: 13):
        assert len(made.running) <= 2
    assert [seq.output_ids for seq in sequences] == [list(range(5))] * 4
    assert [(seq.preemptions, seq.recompute_until) for seq in sequences] == [(0, 0)] * 2 + [(1, 3)] * 2


def test_who_joined_in_the_very_step_that_found_no_memory_has_not_joined() -> None:
    made = scheduler("dynamic", 4)
    for seq in requests((0, 3, 5), (0, 3, 5)):
        made.add(seq)
    plan = made.plan(1)
    assert plan is not None
    made.preempt(plan, plan.sequences[1:], 1)
    record = made.commit(plan, next_tokens(plan), 2)
    assert (record.joined, record.preempted, record.queue) == (["r0"], [], 1)


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
    assert first["slot_steps"] == {"useful": 1.5, "padding": 0.5, "held": 0, "idle": 2, "recomputed": 0.0}
    assert second["slot_steps"] == {"useful": 1, "padding": 0, "held": 1, "idle": 2, "recomputed": 0.0}
    assert second["left"] == [{"id": "r0", "reason": "length"}, {"id": "r1", "reason": "length"}]
    assert [(s.batch_max, s.iterations) for s in run.sequences] == [(2, 1), (2, 2)]


def test_in_a_padded_row_only_the_computed_part_is_recomputed() -> None:
    """Two requests are preempted after their prompts of 2 and 8, and compute 3 and 9 tokens in rows of 9."""
    run = drive(scheduler("static", 4), requests((0, 2, 2), (0, 2, 2), (0, 2, 2), (0, 8, 2)), preempt={2})
    again = next(it.slot_steps for it in run.iterations if it.slot_steps.recomputed)
    assert again == pytest.approx((2 / 9, 6 / 9, 0, 2, 10 / 9))


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


SWITCHED = [*policies.names(), "dynamic+srpt", "dynamic+mlfq", "dynamic+vtc", "tgi+drr", "static+sjf"]


@pytest.mark.parametrize("old", SWITCHED)
def test_a_live_switch_to_any_policy_loses_nobody(old: str) -> None:
    shapes = [(3 * i, 1 + i * 5 % 9, 1 + i * 7 % 6) for i in range(12)]
    for new in SWITCHED:
        for at, fewer in ((1, False), (3, True), (6, False), (9, True)):
            sequences = requests(*shapes)
            for i, seq in enumerate(sequences):
                seq.client = "ab"[i % 2]
            pool = PagePool(12, 4, salt="test")
            policy = policies.get_policy(new, 2 if fewer else 5)
            run = drive(scheduler(old, 4, pool, 6), sequences, switch={at: policy})
            assert [s.finish_reason for s in sequences] == ["length"] * 12, (old, new, at)
            assert run.iterations[0].policy == old
            assert run.iterations[-1].policy == new


@given(
    traces(),
    st.lists(st.tuples(st.sampled_from(SWITCHED), slots), min_size=1, max_size=6),
    pools(),
    budgets,
    faults,
    faults,
)
def test_nobody_is_lost_however_often_policies_are_switched(
    trace: list[Request],
    chosen: list[tuple[str, int]],
    pool: Pool,
    budget: int,
    cancel: dict[int, list[int]],
    fail: dict[int, list[int]],
) -> None:
    switch = {2 * i: policies.get_policy(name, slots) for i, (name, slots) in enumerate(chosen)}
    run = drive(
        scheduler("dynamic", 3, pool(), budget), requests(*trace), forward=failing(fail), cancel=cancel, switch=switch
    )
    assert all(seq.finish_reason in ("length", "abort") for seq in run.sequences)


def test_after_a_switch_to_fewer_slots_those_who_run_finish_and_the_rest_go_one_by_one() -> None:
    nobatch = policies.get_policy("nobatch")
    run = drive(scheduler("dynamic", 3), requests(*[(0, 2, 4)] * 5), switch={1: nobatch})
    assert [it.batch_size for it in run.iterations] == [3] * 4 + [1] * 8
    assert [it.slot_steps.idle for it in run.iterations] == [0] * 12
    assert run.sequences[3].waited == {"slots_full": (4, run.sequences[0].finished_at)}


def test_a_switch_to_more_slots_lets_those_who_wait_join_at_once() -> None:
    dynamic = policies.get_policy("dynamic", 4)
    run = drive(scheduler("nobatch", 1), requests(*[(0, 2, 4)] * 5), switch={2: dynamic})
    assert [it.batch_size for it in run.iterations[:3]] == [1, 1, 4]


def test_a_switch_lets_go_whom_only_the_old_policy_held() -> None:
    loop = scheduler("static", 3)
    done, live = requests((0, 2, 1), (0, 2, 5))
    for seq in (done, live):
        loop.add(seq)
    loop.step(next_tokens, lambda: 5.0)
    assert done.state == "held"
    assert loop.switch(policies.get_policy("dynamic", 3), 6.0) == [done]
    assert (done.state, done.finished_at, loop.running) == ("finished", 6.0, [live])


def test_a_new_policy_hears_of_those_who_wait_in_their_order_and_of_those_who_run() -> None:
    heard = []

    class Listening(Policy):
        def on_arrival(self, seq, now):
            heard.append(("waits", seq.id, now))

        def on_admit(self, seq, now):
            heard.append(("runs", seq.id, now))

    loop = scheduler("nobatch", 1)
    for seq in requests((0, 2, 4), (1, 2, 4), (2, 2, 4)):
        loop.add(seq)
    loop.plan(3)
    loop.switch(Listening(2), 5)
    assert heard == [("runs", "r0", 5), ("waits", "r1", 1), ("waits", "r2", 2)]


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
def test_a_policy_that_asks_for_what_cannot_be_is_told_which_hook_it_was(
    hook: str, answer: Callable, words: str
) -> None:
    mine = type("Mine", (Policy,), {hook: lambda self, *args: answer(*args)})(2)
    mine.admit = lambda waiting, running, budget, now: budget.slots
    loop = Scheduler(mine)
    loop.add(requests((0, 2, 3))[0])

    def run() -> None:
        for _ in range(2):
            loop.step(next_tokens, lambda: 0.0)

    with pytest.raises(PolicyError, match=words):
        run()


def test_without_records_of_members_everything_else_is_the_same() -> None:
    runs = []
    for record in (True, False):
        loop = Scheduler(policies.get_policy("dynamic", 3), None, 5, record=record)
        sequences = requests((0, 6, 3), (2, 3, 5), (30, 7, 2), (31, 2, 9))
        while True:
            todo = [s for s in sequences if s.state == "waiting" and s not in loop.waiting]
            if not todo and loop.is_idle:
                break
            for seq in todo:
                loop.add(seq)
            loop.step(next_tokens, lambda loop=loop: 10.0 * loop.number)
        runs.append([(s.finished_at, s.first_token_at, s.waited, s.batch_sum) for s in sequences])
    assert runs[0] == runs[1]


def test_steps_alike_are_as_many_as_can_follow_each_other_unseen() -> None:
    loop = scheduler("dynamic", 2)
    first, second, third = requests((0, 2, 6), (0, 2, 9), (0, 2, 1))
    for seq in (first, second):
        loop.add(seq)
    plans = []
    for _ in range(3):
        plan = loop.plan(0)
        assert plan is not None
        plans.append(identical_steps_ahead(loop, plan))
        loop.commit(plan, next_tokens(plan), 1)
    assert plans == [1, 5, 4]
    assert admission_closed(loop)
    loop.add(third)
    plan = loop.plan(1)
    assert plan is not None
    assert identical_steps_ahead(loop, plan) == 3  # no slot is free, so the third changes nothing
    loop.switch(policies.get_policy("dynamic", 3), 1)
    assert not admission_closed(loop)
    assert identical_steps_ahead(loop, plan) == 1


def test_a_step_of_many_thousand_rows_is_left_by_all_of_them_at_once() -> None:
    loop = scheduler("dynamic", 20_000)
    run = drive(loop, [Sequence([1], 2, id=str(i)) for i in range(20_000)])
    assert len(run.iterations) == 2

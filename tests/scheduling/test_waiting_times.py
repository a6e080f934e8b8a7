"""Why each request waited, and for how long."""

from __future__ import annotations

from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.scheduling import drive, make_scheduler, next_tokens, plan_of, requests


def test_waiting_for_a_slot_is_reported() -> None:
    run = drive(make_scheduler("nobatch", 1), requests((0, 4, 3), (5, 8, 1), (6, 2, 5)))
    # r1 comes during step 1 (0..14), at whose end it learns that the slot is taken, until 38
    assert run.sequences[0].waited == {}
    assert run.sequences[1].waited == {"policy_order": (1, 9), "slots_full": (2, 24)}
    assert run.sequences[2].waited == {"policy_order": (1, 8), "slots_full": (3, 42)}
    assert [step.blocked_by for step in run.iterations] == [None, *["slots_full"] * 3, *[None] * 5]


def test_waiting_for_pages_is_reported() -> None:
    pool = PagePool(3, 4)  # two pages: room for 8 tokens
    run = drive(make_scheduler("dynamic", 4, pool), requests((0, 4, 4), (0, 4, 1)))
    assert run.sequences[1].waited == {"kv_full": (4, run.sequences[0].finished_at)}


def test_waiting_for_the_end_of_a_static_batch_is_reported() -> None:
    run = drive(make_scheduler("static", 2), requests((0, 4, 3), (5, 8, 1)))
    assert run.sequences[1].waited == {"policy_order": (3, 33)}
    assert [step.get("blocked_by") for step in run.records()] == [None, "policy_order", "policy_order", None]


def test_the_wait_of_a_cancelled_request_is_reported() -> None:
    run = drive(make_scheduler("nobatch", 1), requests((0, 4, 3), (0, 4, 3)), cancel={2: [0]})
    assert run.sequences[1].finish_reason == "abort"
    assert run.sequences[1].waited == {"slots_full": (2, 26)}


def test_a_request_that_arrived_before_the_last_plan_but_was_added_after_it_waited_since_its_arrival() -> None:
    loop = make_scheduler("nobatch", 1)
    running, late = requests((0, 4, 3), (9, 4, 1))
    loop.add(running)
    plan = plan_of(loop, 10)
    loop.add(late)
    loop.commit(plan, next_tokens(plan), 20)
    loop.remove_all([running], 20)
    assert loop.plan(25) is not None
    assert late.scheduled_at == 25
    assert sum(seconds for _, seconds in late.waited.values()) == 16


def test_a_request_that_enters_an_empty_queue_inherits_no_reason() -> None:
    loop = make_scheduler("nobatch", 1)
    running, gone, late = requests((0, 4, 3), (0, 4, 1), (12, 4, 1))
    loop.add(running)
    loop.add(gone)
    plan = plan_of(loop, 0)
    loop.commit(plan, next_tokens(plan), 14)
    loop.remove_all([gone], 14)
    loop.add(late)
    assert loop.plan(14) is not None
    loop.remove_all([late], 20)
    assert late.waited == {"policy_order": (0, 2), "slots_full": (1, 6)}


def test_waiting_for_a_deadline_of_the_policy_is_reported_and_wakes_the_loop() -> None:
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


def test_a_queue_of_thousands_is_not_searched() -> None:
    """Count what the policy is shown of the queue, instead of taking time."""
    looked_at = 0
    loop = make_scheduler("dynamic", 4)

    def order(waiting, now):
        nonlocal looked_at
        for seq in waiting:
            looked_at += 1
            yield seq

    loop.policy.order = order  # type: ignore[method-assign]
    drive(loop, [Sequence([1], 1, id=str(i)) for i in range(2000)])
    assert looked_at == 2000

"""A live switch to another policy: no request is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from scheduling.pages import PagePool
from scheduling.policy import Policy
from tests.support import points
from tests.support.scheduling import Request, add_all, drive, failing, make_scheduler, next_tokens, requests
from tests.support.strategies import Faults, Pool, budgets, faults, pools, slots, traces

SWITCHED = ["static", "dynamic", "chunked", "multibin", "dynamic+mlfq", "tgi+drr"]  # then those for --all
SWITCHED += [name for name in policies.names() if name not in SWITCHED]
SWITCHED += ["dynamic+srpt", "dynamic+vtc", "static+sjf"]


@pytest.mark.parametrize("old", points(6, *SWITCHED))
def test_a_live_switch_to_any_policy_loses_no_request(old: str) -> None:
    shapes = [(3 * i, 1 + i * 5 % 9, 1 + i * 7 % 6) for i in range(12)]
    for new in SWITCHED:
        for at, fewer in ((1, False), (3, True), (6, False), (9, True)):
            sequences = requests(*shapes)
            for i, seq in enumerate(sequences):
                seq.client = "ab"[i % 2]
            pool = PagePool(12, 4, salt="test")
            policy = policies.get_policy(new, 2 if fewer else 5)
            run = drive(make_scheduler(old, 4, pool, 6), sequences, switch={at: policy})
            assert [s.finish_reason for s in sequences] == ["length"] * 12, (old, new, at)
            assert run.iterations[0].policy == old
            assert run.iterations[-1].policy == new


@given(
    traces(), st.lists(st.tuples(st.sampled_from(SWITCHED), slots), min_size=1, max_size=6), pools(), budgets, faults, faults
)  # fmt: skip
def test_no_request_is_lost_however_often_policies_are_switched(
    trace: list[Request], chosen: list[tuple[str, int]], pool: Pool, budget: int, cancel: Faults, fail: Faults
) -> None:
    switch = {2 * i: policies.get_policy(name, slots) for i, (name, slots) in enumerate(chosen)}
    scheduler = make_scheduler("dynamic", 3, pool(), budget)
    run = drive(scheduler, requests(*trace), forward=failing(fail), cancel=cancel, switch=switch)
    assert all(seq.finish_reason in ("length", "abort") for seq in run.sequences)


def test_after_a_switch_to_fewer_slots_running_requests_finish_and_the_others_run_one_by_one() -> None:
    nobatch = policies.get_policy("nobatch", 3)
    run = drive(make_scheduler("dynamic", 3), requests(*[(0, 2, 4)] * 5), switch={1: nobatch})
    assert [it.batch_size for it in run.iterations] == [3] * 4 + [1] * 8
    assert [it.slot_steps.idle for it in run.iterations] == [0] * 4 + [2] * 8  # of the engine's three
    assert run.sequences[3].waited == {"slots_full": (4, run.sequences[0].finished_at)}


def test_a_switch_to_more_slots_lets_waiting_requests_join_at_once() -> None:
    dynamic = policies.get_policy("dynamic", 4)
    run = drive(make_scheduler("nobatch", 1), requests(*[(0, 2, 4)] * 5), switch={2: dynamic})
    assert [it.batch_size for it in run.iterations[:3]] == [1, 1, 4]


def test_a_switch_releases_requests_that_only_the_old_policy_held() -> None:
    loop = make_scheduler("static", 3)
    done, live = requests((0, 2, 1), (0, 2, 5))
    add_all(loop, (done, live))
    loop.step(next_tokens, lambda: 5.0)
    assert done.state == "held"
    assert loop.switch(policies.get_policy("dynamic", 3), 6.0) == [done]
    assert (done.state, done.finished_at, loop.running) == ("finished", 6.0, [live])


def test_a_new_policy_is_notified_of_waiting_requests_in_their_order_and_of_running_ones() -> None:
    heard = []

    class Listening(Policy):
        def on_arrival(self, seq, now):
            heard.append(("waits", seq.id, now))

        def on_admit(self, seq, now):
            heard.append(("runs", seq.id, now))

    loop = make_scheduler("nobatch", 1)
    add_all(loop, requests((0, 2, 4), (1, 2, 4), (2, 2, 4)))
    loop.plan(3)
    loop.switch(Listening(2), 5)
    assert heard == [("runs", "r0", 5), ("waits", "r1", 1), ("waits", "r2", 2)]

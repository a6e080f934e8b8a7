"""Each policy on its own: timelines worked out by hand, and what makes it itself on any trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest
from driver import Request, Run, drive, pools, requests, scheduler, traces
from hypothesis import given
from hypothesis import strategies as st

import policies
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

TRACE_A = [(0, 4, 3), (5, 8, 1), (6, 2, 5), (60, 4, 2)]
TRACE_B = [(0, 5, 4), (1, 5, 6), (2, 5, 2), (3, 5, 1)]
ALL = ["nobatch", "static", "dynamic"]

slots = st.integers(1, 5)


@pytest.mark.parametrize(
    ("trace", "policy", "budget", "times", "steps", "held"),
    [
        (TRACE_A, "nobatch", 2048, "14/38 56/56 68/116 130/142", 11, 0),
        (TRACE_A, "static", 2048, "14/38 64/120 64/120 134/146", 10, 4),
        (TRACE_A, "dynamic", 2048, "14/48 34/34 48/102 76/90", 7, 0),
        (TRACE_A, "dynamic", 6, "14/46 46/46 58/112 86/100", 8, 0),  # SCHEDULING's `chunked`, C=6
        (TRACE_B, "nobatch", 2048, "15/51 66/126 141/153 168/168", 13, 0),
        (TRACE_B, "static", 2048, "15/51 71/141 71/141 156/156", 11, 4),
        (TRACE_B, "dynamic", 2048, "15/60 32/108 77/91 108/108", 7, 0),
    ],
)
def test_a_timeline_is_what_it_is_by_hand(
    trace: list[Request], policy: str, budget: int, times: str, steps: int, held: int
) -> None:
    run = drive(scheduler(policy, 2, budget=budget), requests(*trace))
    assert " ".join(f"{s.first_token_at}/{s.finished_at}" for s in run.sequences) == times
    assert run.now == max(int(pair.split("/")[1]) for pair in times.split())
    assert (len(run.iterations), run.held) == (steps, held)


@given(traces(), slots, pools())
def test_nobatch_runs_one_at_a_time_in_order_of_arrival(
    trace: list[Request], slots: int, pool: Callable[[], PagePool | None]
) -> None:
    run = drive(scheduler("nobatch", slots, pool()), requests(*trace))
    assert max(it.batch_size for it in run.iterations) == 1
    assert [id for it in run.iterations for id, _ in it.left] == [s.id for s in run.sequences]


@given(traces(), slots, pools())
def test_static_batches_start_and_end_together(
    trace: list[Request], slots: int, pool: Callable[[], PagePool | None]
) -> None:
    run = drive(scheduler("static", slots, pool()), requests(*trace))
    for it in run.iterations:
        members = [m.id for m in it.members]
        assert it.joined in ([], members)
        assert sorted(id for id, _ in it.left) in ([], sorted(members))
    for _, batch in groupby(run.sequences, lambda s: s.first_iteration):
        batch = list(batch)
        assert len({s.finished_at for s in batch}) == 1
        assert {s.batch_sum / s.iterations for s in batch} == {len(batch)}


@given(traces(), slots)
def test_static_holds_every_slot_from_its_last_token_to_the_longest_members(
    trace: list[Request], slots: int
) -> None:
    run = drive(scheduler("static", slots), requests(*trace))
    batches = [list(b) for _, b in groupby(run.sequences, lambda s: s.first_iteration)]
    wanted = sum(max(s.max_tokens for s in b) - s.max_tokens for b in batches for s in b)
    assert run.held == wanted


@given(traces(), slots)
def test_static_takes_the_oldest_that_wait_up_to_its_slots(
    trace: list[Request], slots: int
) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        assert not (plan.joined and scheduler.waiting) or len(plan.joined) == slots

    run = drive(scheduler("static", slots), requests(*trace), planned=planned)
    assert [id for it in run.iterations for id in it.joined] == [s.id for s in run.sequences]


@given(traces(), slots, pools())
def test_dynamic_leaves_no_slot_idle_while_the_oldest_who_waits_fits(
    trace: list[Request], slots: int, pool: Callable[[], PagePool | None]
) -> None:
    def planned(scheduler: Scheduler, plan: Plan) -> None:
        if scheduler.waiting and len(scheduler.running) < slots:
            oldest = next(iter(scheduler.waiting))
            assert scheduler.pages is not None
            assert scheduler.pages.reserve(oldest.hashes, oldest.total) is None

    run = drive(scheduler("dynamic", slots, pool()), requests(*trace), planned=planned)
    assert run.held == 0
    assert [id for it in run.iterations for id in it.joined] == [s.id for s in run.sequences]
    assert all(s.finished_at == s.last_token_at for s in run.sequences)


@given(traces())
def test_with_one_slot_all_policies_are_one(trace: list[Request]) -> None:
    def seen(run: Run) -> list[tuple]:
        return [(it.t, it.seconds, it.members, it.joined, it.left) for it in run.iterations]

    runs = [seen(drive(scheduler(policy, 1), requests(*trace))) for policy in ALL]
    assert runs[0] == runs[1] == runs[2]


def test_a_short_request_that_arrives_late_overtakes_a_long_one_only_in_dynamic() -> None:
    overtakes = {}
    for policy in ALL:
        long, short = drive(scheduler(policy, 4), requests((0, 3, 30), (5, 3, 2))).sequences
        overtakes[policy] = short.finished_at < long.finished_at
    assert overtakes == {"nobatch": False, "static": False, "dynamic": True}


def test_a_slot_is_taken_again_in_the_next_iteration() -> None:
    run = drive(scheduler("dynamic", 1), requests((0, 3, 2), (0, 3, 2)))
    assert [it.members[0].id for it in run.iterations] == ["r0", "r0", "r1", "r1"]
    assert {it.members[0].slot for it in run.iterations} == {0}


@pytest.mark.parametrize("policy", ALL)
def test_a_policy_is_found_by_its_files_name(policy: str) -> None:
    assert policy in policies.names()
    assert policies.get_policy(policy, max_batch_size=3).name == policy


def test_an_unknown_policy_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ValueError, match=r"'dinamic'.*mean 'dynamic'.*nobatch, .*static, "):
        policies.get_policy("dinamic", max_batch_size=3)


@pytest.mark.parametrize("name", ["__init__", "../stats", "", "static.Policy"])
def test_only_policies_are_imported(name: str) -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        policies.check_name(name)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_batch_of_nobody_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        policies.get_policy(policy, max_batch_size=0)


def test_the_budget_is_shared_decodes_first_then_prompts_in_order() -> None:
    policy = policies.get_policy("dynamic", max_batch_size=8)
    first, decoding, second, third, done = (Sequence([7] * n, 5) for n in (6, 3, 5, 4, 2))
    decoding.computed, decoding.output_ids = 3, [1]
    done.computed, done.output_ids, done.finish_reason = 2, [1], "length"
    running = [first, decoding, second, third, done]
    assert policy.share(running, 10) == [6, 1, 3, 0, 0]
    assert policy.share(running, 100) == [6, 1, 5, 4, 0]

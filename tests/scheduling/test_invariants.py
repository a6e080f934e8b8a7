"""What every policy keeps on random traces, with failing rows, cancellations and preemptions in between.

`driver.drive` checks conservation, slots, pages, tokens and waiting times of every run after every step.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from tests.support.scheduling import Request, drive, failing, make_scheduler, requests, toy_cost
from tests.support.strategies import Faults, Pool, budgets, faults, pools, slots, traces

ALL = ["nobatch", "static", "dynamic"]
MORE = ["static-exact", "impatient", "elastic", "window", "multibin", "bucket", "static-global", "chunked",
        "prefill-first", "tgi", "lightllm", "adaptive", "dynamic+srpt", "dynamic+mlfq", "dynamic+vtc-pred"]  # fmt: skip
every_policy = pytest.mark.parametrize("policy", ALL)


@pytest.mark.parametrize("policy", [*ALL, *MORE])
@given(traces(), slots, pools(), budgets, faults, faults, st.sets(st.integers(1, 25), max_size=5))
def test_every_request_gets_exactly_its_tokens_unless_it_fails_or_is_cancelled(
    policy: str,
    trace: list[Request],
    slots: int,
    pool: Pool,
    budget: int,
    cancel: Faults,
    fail: Faults,
    out_of_memory: set[int],
) -> None:
    run = drive(
        make_scheduler(policy, slots, pool(), budget), requests(*trace),
        forward=failing(fail), cancel=cancel, preempt=out_of_memory,
    )  # fmt: skip
    for seq in run.sequences:
        assert seq.finish_reason == "length" or any(cancel.values()) or any(fail.values())
        assert seq.output_ids == list(range(len(seq.output_ids)))
        assert seq.error is None or seq.finish_reason == "abort"
    left = [id for it in run.iterations for id, _ in it.left]
    assert len(set(left)) == len(left)
    assert len(left) == len(trace) or any(cancel.values())


@every_policy
@given(traces(), slots, pools(), budgets, faults, faults)
def test_the_same_input_gives_the_same_records(
    policy: str, trace: list[Request], slots: int, pool: Pool, budget: int, cancel: Faults, fail: Faults
) -> None:
    first, second = (
        drive(make_scheduler(policy, slots, pool(), budget), requests(*trace), forward=failing(fail), cancel=cancel)
        for _ in range(2)
    )
    assert first.records() == second.records()


@every_policy
@given(traces(), slots, pools(), faults)
def test_littles_law_holds_between_records_and_latencies(
    policy: str, trace: list[Request], slots: int, pool: Pool, cancel: Faults
) -> None:
    run = drive(make_scheduler(policy, slots, pool()), requests(*trace), cancel=cancel)
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
    half = drive(make_scheduler(policy, slots), requests(*trace))
    whole = drive(make_scheduler(policy, slots), requests(*double), cost=lambda plan: 2 * toy_cost(plan))
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

    drive(make_scheduler("dynamic", slots, pool(), budget), requests(*trace), planned=planned)

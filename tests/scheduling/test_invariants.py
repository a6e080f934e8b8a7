"""What every policy keeps on random traces, with failing rows, cancellations and preemptions in between.

`drive` checks conservation, slots, pages, tokens and waiting times of every run after every step. The law checker shows
of every policy that a run can be repeated and keeps Little's law (tests/simulate/test_check.py).
"""

from __future__ import annotations

from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.speculation import Speculator
from simulate.laws.contents import Contents
from simulate.laws.scripted_drafter import ScriptedDrafter
from tests.support.scheduling import Request, drive, failing, make_scheduler, requests, toy_cost
from tests.support.strategies import Faults, Pool, budgets, faults, pools, slots, tight_pools, traces

ALL = ["nobatch", "static", "dynamic"]
MORE = ["static-exact", "impatient", "elastic", "window", "multibin", "bucket", "static-global", "chunked",
        "prefill-first", "tgi", "lightllm", "adaptive", "baton", "econoserve", "dynamic+srpt", "dynamic+mlfq",
        "dynamic+vtc", "dynamic+vtc-pred", "dynamic+sjf"]  # fmt: skip


@pytest.mark.parametrize("policy", [*ALL, *MORE])
@settings(max_examples=3 * settings.default.max_examples // 2)
@given(
    traces(), slots, pools() | tight_pools(), budgets, faults, faults, st.sets(st.integers(1, 25), max_size=5),
    st.none() | st.integers(1, 4),
    st.none() | st.tuples(st.sampled_from([1, 2, 3, 7]), st.sampled_from([1, 2, 5, None])),
)  # fmt: skip
def test_every_request_gets_exactly_its_tokens_from_keys_of_its_own_unless_it_fails_or_is_cancelled(
    policy: str,
    trace: list[Request],
    slots: int,
    pool: Pool,
    budget: int,
    cancel: Faults,
    fail: Faults,
    out_of_memory: set[int],
    margin: int | None,
    drafts: tuple[int, int | None] | None,
) -> None:
    """With a `margin`, pages grow with the answers; `drafts` says that each n-th is wrong, and how many a step has."""
    pages, sequences = pool(), requests(*trace)
    made = make_scheduler(policy, slots, pages, budget)
    contents = Contents(pages.page_size) if pages else None
    if margin is not None:
        made.policy.margin = margin
        for seq in sequences:
            seq.open_ended = True
    if drafts is not None:
        every, fixed = drafts
        made.speculator = Speculator(ScriptedDrafter(lambda seq, place: place, every), fixed)

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        for seq, count, proposed in zip_longest(plan.sequences, plan.counts, plan.drafts):
            assert contents is None or contents.compute(seq, count, proposed or ())
        if pages and margin is not None:
            live = [seq for seq in scheduler.running if not seq.is_finished]
            assert all(len(seq.pages) * pages.page_size >= min(seq.length + 1, seq.total) for seq in live)
        assert not any(seq.pages for seq in scheduler.waiting)

    run = drive(made, sequences, forward=failing(fail), cancel=cancel, preempt=out_of_memory, planned=planned)
    for seq in run.sequences:
        assert seq.finish_reason == "length" or any(cancel.values()) or any(fail.values())
        assert seq.output_ids == list(range(len(seq.output_ids)))
        assert seq.error is None or seq.finish_reason == "abort"
        assert 0 <= seq.accepted <= seq.drafted
    left = [id for it in run.iterations for id, _ in it.left]
    assert len(set(left)) == len(left)
    assert len(left) == len(trace) or any(cancel.values())
    if not out_of_memory:
        assert sum(len(it.preempted) for it in run.iterations) == sum(seq.preemptions for seq in run.sequences)
    if pages:
        asked = sum(len(seq.prompt_ids) for seq in run.sequences if seq.scheduled_at is not None)
        assert pages.query_tokens == (asked if pages.prefix_cache else 0)
        assert pages.hit_tokens == sum(seq.cached for seq in run.sequences)


@pytest.mark.parametrize("policy", ALL)
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

"""Admission control: what the estimate says, that nothing is refused which could be on time, and what it is for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from batching import InferenceError
from costs.published import Constant
from scheduling.backlog import FITTED
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import simulate
from tests.support import SOON
from tests.support.scheduling import KnownLaw, Request, drive, make_scheduler, requests
from tests.support.serving import Serve, inference
from tests.support.strategies import traces

NAME = "dynamic+admission-control"


def cost(plan: Plan) -> int:
    return 10 + sum(plan.counts)


def served(sequences: list[Sequence], slots: int, *, known: bool = True, **options: object) -> list[Sequence]:
    scheduler = make_scheduler(NAME, slots, **options)
    if known:
        scheduler.backlog.law = KnownLaw()
    drive(scheduler, sequences, cost=cost)
    return sequences


def test_a_request_is_refused_if_it_would_end_a_moment_after_its_deadline() -> None:
    # The first one ends at 14 + 11 + 11 = 36, and the second takes 10 + 2.
    for deadline, end in ((47.0, 1), (48.0, 48)):
        first, second = requests((0, 4, 3), (1, 2, 1))
        second.deadline = deadline
        served([first, second], 1)
        assert (first.finished_at, second.finished_at) == (36, end)
        assert second.estimate == (36, 48)
    assert second.finish_reason == "length"


def test_a_request_without_a_deadline_gets_that_of_the_option_and_slack_allows_more() -> None:
    def reasons(**options: object) -> list[str | None]:
        return [seq.finish_reason for seq in served(requests((0, 4, 3), (1, 2, 1)), 1, **options)]

    assert reasons() == reasons(slo=47) == reasons(slo=46, slack=1) == ["length", "length"]
    assert reasons(slo=46) == ["length", "refused"]


@given(traces(), st.integers(1, 4))
def test_no_request_ends_before_its_estimate_and_the_last_one_exactly_then(trace: list[Request], slots: int) -> None:
    sequences = served(requests(*trace), slots)
    for seq in sequences:
        assert seq.estimate is not None
        assert (seq.scheduled_at, seq.finished_at) >= seq.estimate
        assert seq.finished_at >= seq.estimate.ends_at
    last = max(sequences, key=lambda seq: seq.arrived_at)
    if [seq.arrived_at for seq in sequences].count(last.arrived_at) == 1:
        assert (last.scheduled_at, last.finished_at) == last.estimate


def test_an_idle_engine_refuses_nothing_that_can_be_on_time_and_the_rest() -> None:
    for deadline, reason in ((21.0, "refused"), (22.0, "length")):
        (seq,) = requests((0, 1, 2))  # 11 + 11
        seq.deadline = deadline
        assert served([seq], 4)[0].finish_reason == reason


def test_nothing_is_refused_before_the_time_of_steps_is_known() -> None:
    sequences = requests((0, 4, FITTED + 8), (10, 2, 1), (14 + 11 * FITTED, 2, 1))
    sequences[1].deadline = sequences[2].deadline = 1.0
    served(sequences, 1, known=False)
    assert [(seq.finish_reason, seq.estimate is None) for seq in sequences] == [
        ("length", True), ("length", True), ("refused", False),
    ]  # fmt: skip


def test_with_the_law_of_its_own_steps_many_more_are_on_time_and_none_is_late_by_more_than_a_step_or_two() -> None:
    late, on_time = {}, {}
    for name, slack in (("dynamic", 0.0), (NAME, 0.0), (NAME, -0.05)):
        sequences = [
            Sequence([0] * 20, 20, id=str(i), arrived_at=0.03 * i, deadline=0.03 * i + 1.0) for i in range(400)
        ]
        policy = policies.get_policy(name, 4, {"slack": slack} if name == NAME else {})
        simulate(Scheduler(policy), sequences, Constant())  # a step takes 0.0082 to 0.0088 s
        over = [seq.finished_at - seq.deadline for seq in sequences if seq.finish_reason == "length"]
        late[name, slack], on_time[name, slack] = max(over), sum(by <= 0 for by in over)
    assert late["dynamic", 0.0] > 4
    assert late[NAME, 0.0] < 2 * 0.0088
    assert late[NAME, -0.05] <= 0
    assert on_time[NAME, -0.05] > 4 * on_time["dynamic", 0.0]


def test_the_server_refuses_with_the_time_after_which_to_retry(serve: Serve) -> None:
    served = serve(policies.get_policy(NAME, max_batch_size=1))
    assert served.ask("learn", FITTED + 1, deadline=1e-9).wait_for_completion(SOON)
    held = served.hold()
    seconds = [served.ask(f"{i}", 1) for i in range(2)]
    late = served.ask("late", 1, deadline=1e-9)
    served.model.gate.set()
    for each in (held, *seconds):
        assert each.wait_for_completion(SOON)
        assert each.sequence.estimate is not None
    with pytest.raises(InferenceError, match=r"too late.*slo_s") as refused:
        late.wait_for_completion(SOON)
    assert (refused.value.kind, late.is_received) == ("overloaded", True)
    assert refused.value.retry_after == max(1, math.ceil(late.sequence.estimate.joins_at - late.sequence.arrived_at))
    assert served.is_empty()
    assert not inference("new", 1).is_received

"""Triton's queue policies and instances, by timelines that were worked out by hand: 10 + prompt tokens + 2 x decodes a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from costs.cost import Cost
from costs.steps import Step
from scheduling.scheduler import Scheduler
from simulate.__main__ import main
from simulate.fleet.instances import Instances
from tests.support import SOON
from tests.support.scheduling import Request, Run, drive, make_scheduler, requests
from tests.support.serving import Serve, kind_of
from tests.support.strategies import traces

FIRST = (0, 4, 3)  # alone in one slot, its steps end at 14, 26 and 38


def served(
    *trace: tuple[Request, int, float | None], slots: int = 1, **options: object
) -> list[tuple[float | None, float]]:
    """Return when each request joined and left: (arrival, prompt, output), priority, deadline."""
    sequences = requests(*(request for request, _, _ in trace))
    for seq, (_, priority, deadline) in zip(sequences, trace):
        seq.priority, seq.deadline = priority, deadline
    drive(make_scheduler("triton", slots, **options), sequences)
    return [(seq.scheduled_at, seq.finished_at) for seq in sequences]


def test_a_higher_level_goes_first_and_other_priorities_are_the_default_level() -> None:
    times = served(
        (FIRST, 0, None), ((1, 2, 1), 2, None), ((2, 2, 1), 1, None), ((3, 2, 1), 0, None), ((4, 2, 1), 7, None),
        priority_levels=2,
    )  # fmt: skip
    assert times == [(0, 38), (74, 86), (38, 50), (50, 62), (62, 74)]


def test_a_request_is_turned_away_before_the_first_step_after_the_timeout_of_its_level() -> None:
    times = served(
        (FIRST, 0, None), ((1, 2, 1), 2, None), ((2, 2, 1), 1, None), ((7, 2, 1), 1, None), ((19, 2, 1), 1, None),
        priority_levels=2, timeout="20,0",
    )  # fmt: skip
    assert times == [(0, 38), (50, 62), (None, 26), (None, 38), (38, 50)]


def test_a_delayed_request_waits_behind_its_level_and_before_the_next() -> None:
    times = served(
        (FIRST, 0, None), ((1, 2, 1), 2, None), ((2, 2, 1), 1, None), ((3, 2, 1), 1, None), ((30, 2, 1), 1, None),
        priority_levels=2, timeout=20, timeout_action="delay",
    )  # fmt: skip
    assert times == [(0, 38), (74, 86), (50, 62), (62, 74), (38, 50)]


def test_a_request_may_shorten_the_timeout_but_not_raise_it() -> None:
    trace = (FIRST, 0, None), ((1, 2, 1), 0, 11.0), ((2, 2, 1), 0, 100.0), ((3, 2, 1), 0, 100.0)
    assert served(*trace, timeout=40, allow_timeout_override="on") == [(0, 38), (None, 14), (38, 50), (None, 50)]
    assert served(*trace, timeout=40) == [(0, 38), (38, 50), (None, 50), (None, 50)]
    assert served(*trace, allow_timeout_override="on") == [(0, 38), (38, 50), (50, 62), (62, 74)]


def test_a_full_level_refuses_at_the_door() -> None:
    times = served(
        (FIRST, 0, None), ((1, 2, 1), 1, None), ((2, 2, 1), 1, None), ((3, 2, 1), 1, None), ((4, 2, 1), 2, None),
        ((5, 2, 1), 2, None), priority_levels=2, max_queue_size="2,1",
    )  # fmt: skip
    assert times == [(0, 38), (38, 50), (50, 62), (None, 3), (62, 74), (None, 5)]


def test_a_request_may_time_out_while_an_idle_engine_waits_for_others() -> None:
    assert served(((0, 4, 1), 0, None), slots=2, delay=100, timeout=20) == [(None, 20)]
    assert served(((0, 4, 1), 0, None), slots=2, delay=100, timeout=20, timeout_action="delay") == [(100, 114)]


def test_after_a_switch_those_that_wait_time_out_by_the_new_policy() -> None:
    sequences = requests(FIRST, (1, 2, 1), (13, 2, 1))
    drive(
        make_scheduler("triton", 1, timeout=5), sequences, switch={1: policies.get_policy("triton", 1, {"timeout": 26})}
    )
    assert [(seq.scheduled_at, seq.finished_at) for seq in sequences] == [(0, 38), (None, 38), (38, 50)]


@given(traces(), st.integers(1, 4))
def test_without_its_options_it_is_window(trace: list[Request], slots: int) -> None:
    def records(name: str) -> list[dict]:
        run: Run = drive(make_scheduler(name, slots, delay=20.0, preferred=(2,)), requests(*trace))
        return [{**record, "policy": ""} for record in run.records()]

    assert records("triton") == records("window")


@pytest.mark.parametrize(
    "options",
    [
        {"priority_levels": 2, "preserve_ordering": "on"},
        {"timeout": 1, "timeout_action": "delay", "preserve_ordering": "on"},
        {"priority_levels": 2, "timeout": "1,2,3"}, {"priority_levels": 2, "default_priority_level": 3},
        {"timeout_action": "wait"},
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="policy option"):
        policies.get_policy("triton", 4, options)


class Toy(Cost):
    def seconds(self, step: Step) -> float:
        return 10 + step.prompt + 2 * step.decodes


def instances(*trace: Request, count: int = 2, **options: object) -> list[tuple[float | None, float]]:
    sequences = requests(*trace)
    fleet = Instances([Scheduler(policies.get_policy("triton", 2, options)) for _ in range(count)], Toy())
    fleet.run(sequences)
    assert fleet.pool.load == [0] * count
    return [(seq.scheduled_at, seq.finished_at) for seq in sequences]


TWO_BATCHES = (0, 4, 3), (0, 4, 3), (1, 2, 1), (2, 2, 1), (3, 1, 1)


def test_an_idle_instance_takes_the_next_batch_from_the_one_queue() -> None:
    assert instances(*TWO_BATCHES) == [(0, 46), (0, 46), (1, 13), (13, 27), (13, 27)]
    assert instances(*TWO_BATCHES, count=1) == [(0, 46), (0, 46), (46, 60), (46, 60), (60, 71)]
    assert instances(*TWO_BATCHES, count=1, timeout=5) == [(0, 46), (0, 46), (None, 18), (None, 18), (None, 18)]
    assert instances((0, 4, 3), (1, 2, 3), (2, 2, 1), (3, 1, 1), max_queue_size=1)[3] == (None, 3)


def test_with_preserve_ordering_an_answer_waits_for_earlier_ones_and_its_instance_does_not() -> None:
    assert instances(*TWO_BATCHES, preserve_ordering="on") == [(0, 46), (0, 46), (1, 46), (13, 46), (13, 46)]


def test_the_fleet_has_a_shared_queue_for_closed_loops(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["fleet", "--replicas", "2", "--rate", "3", "--num", "60", "--max-batch-size", "4", "--router"]
    assert main([*call, "shared-queue", "triton", "--router", "round-robin"]) == 0
    assert "shared-queue" in capsys.readouterr().out
    assert main([*call, "shared-queue", "dynamic"]) == 2


def test_the_server_answers_a_request_that_has_timed_out_in_its_level(serve: Serve) -> None:
    options = {"priority_levels": 2, "timeout": "0,1e-9"}
    served = serve(policies.get_policy("triton", max_batch_size=1, options=options))
    held = served.hold()
    late = served.ask("late", 1, priority=2)
    served.model.gate.set()
    assert held.wait_for_completion(SOON)
    assert kind_of(late) == "timeout_error"
    assert served.is_empty()

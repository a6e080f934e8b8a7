"""What fails in a step ends only the requests at fault."""

from __future__ import annotations

from typing import Any

import pytest

from batching import Inference
from scheduling.iteration import Plan
from scheduling.policy import Policy
from scheduling.scheduler import Output
from tests.support import SOON
from tests.support.serving import Serve, Words, expected, is_answered, kind_of, raising


def test_a_failed_step_ends_its_own_requests_only(serve: Serve) -> None:
    served = serve("dynamic", slots=3)
    served.model.breaks = raising(RuntimeError("once"), lambda plan: plan.number == 2)
    first = served.hold("first", 9)
    requests = [served.ask(f"r{i}", 9) for i in range(4)]
    served.model.gate.set()
    assert [kind_of(i) for i in [first, *requests[:2]]] == ["server_error"] * 3
    assert [i.wait_for_completion(SOON) for i in requests[2:]] == [expected(f"r{i}", 9) for i in (2, 3)]


def test_a_model_that_always_fails_leaves_no_finished_member_of_a_batch_behind(serve: Serve) -> None:
    served = serve("static", slots=2)
    served.model.breaks = raising(RuntimeError("for ever"), lambda plan: plan.number > 2)
    served.hold()
    short, long = served.ask("short", 1), served.ask("long", 5)
    served.model.gate.set()
    assert is_answered(short)
    assert kind_of(long) == "server_error"
    assert kind_of(served.ask("next", 1)) == "server_error"
    assert served.is_empty()


@pytest.mark.parametrize("short", [[], [None]])
def test_a_model_that_returns_too_few_outputs_fails_the_request(serve: Serve, short: list[Output]) -> None:
    served = serve()
    served.model.breaks = lambda plan, outputs: short if plan.number else outputs
    assert kind_of(served.ask("a", 3)) == "server_error"
    served.model.breaks = lambda plan, outputs: outputs
    assert is_answered(served.ask("b", 3))


def test_a_request_that_breaks_a_batch_of_8_is_found_and_the_others_get_their_tokens(serve: Serve) -> None:
    served = serve("dynamic", slots=8)
    batch_sizes: list[int] = []

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        batch_sizes.append(len(plan.sequences))
        if any(seq.id == "r5" for seq in plan.sequences):
            raise RuntimeError("poisoned")
        return outputs

    served.hold()
    waiting = {f"r{i}": served.ask(f"r{i}", 6) for i in range(8)}
    served.model.breaks = breaks
    served.model.gate.set()
    assert kind_of(waiting.pop("r5")) == "server_error"
    assert all(map(is_answered, waiting.values()))
    assert served.manager.recovery.steps_failed == 1
    assert batch_sizes[1 : 2 + served.manager.recovery.steps_retried] == [8, 8, 4, 4, 2, 1, 1, 1, 2]
    assert served.is_empty()


@pytest.mark.parametrize("error", [RuntimeError("once"), MemoryError()])
def test_a_step_that_fails_once_affects_no_request(serve: Serve, error: Exception) -> None:
    served = serve("dynamic", slots=4)
    faults = iter([True])
    served.hold()
    waiting = [served.ask(f"r{i}", 3) for i in range(4)]
    served.model.breaks = raising(error, lambda plan: next(faults, False))
    served.model.gate.set()
    assert all(map(is_answered, waiting))
    recovery = served.manager.recovery
    assert (recovery.steps_failed, recovery.steps_retried, served.manager.slot_cap) == (1, 1, 4)
    assert recovery.out_of_memory == isinstance(error, MemoryError)
    assert not any(one.sequence.preemptions for one in waiting)


def test_a_row_that_fails_fails_alone(serve: Serve) -> None:
    served = serve()

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        rows = zip(plan.sequences, outputs)
        return [ValueError("nan") if seq.id == "bad" else token for seq, token in rows]

    served.model.breaks = breaks
    served.hold()
    bad, good = served.ask("bad", 4), served.ask("good", 4)
    served.model.gate.set()
    assert kind_of(bad) == "server_error"
    assert is_answered(good)
    assert served.manager.recovery.steps_failed == 0


def test_a_stop_callback_that_raises_fails_its_own_request_alone(serve: Serve) -> None:
    served = serve()
    served.hold()
    bad = served.ask("bad", 4, text=Words(lambda token: {}[token]))
    stopped = served.ask("stopped", 4, text=Words(lambda token: "stop" if token == 1 else None))
    good = served.ask("good", 4)
    served.model.gate.set()
    assert kind_of(bad) == "server_error"
    assert stopped.wait_for_completion(SOON) == expected("stopped", 2)
    assert is_answered(good)


def test_a_policy_that_raises_ends_the_loop_and_every_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Policy):
        def on_token(self, *args: Any) -> None:
            raise ZeroDivisionError

    served = serve(Broken(max_batch_size=1))
    late: list[Inference] = []

    def breaks(plan: Plan, outputs: list[Output]) -> list[Output]:
        late.append(served.ask("late", 1))
        return outputs

    served.model.breaks = breaks
    everybody = [served.hold(), served.ask("waiting", 1)]
    served.model.gate.set()
    assert [kind_of(i) for i in everybody] == ["unavailable_error"] * 2
    served.thread.join(SOON)
    assert [kind_of(i) for i in late] == ["unavailable_error"]
    assert not served.manager.is_alive
    assert "ZeroDivisionError" in caplog.text


def test_an_observer_that_raises_affects_no_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve()
    served.manager.observers.insert(0, lambda iteration, left: {}["nothing"])
    assert is_answered(served.ask("a", 3))
    assert served.left == ["a"]
    assert "KeyError" in caplog.text

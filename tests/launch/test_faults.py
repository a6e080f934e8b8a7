"""Armed faults: what EB_FAULTS may say, what each does to the engine that it is put into, and to nothing without it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from launch import banner, plugin
from scheduling.iteration import Plan
from scheduling.sequence import Sequence
from tests.support import faults
from tests.support.fakes import FakeModel, fake_engine
from tests.support.servers import run_app


def read(**armed: Any) -> faults.Faults:
    return faults.read(json.dumps(armed))


def plan_of(*prompts: str) -> Plan:
    sequences = [Sequence(list(p.encode()), 4, sampling={}) for p in prompts]
    return Plan(1, 0.0, sequences, [seq.pending for seq in sequences])


def faulty(**armed: Any) -> Any:
    return read(**armed).model(FakeModel(), lambda ids: bytes(ids).decode())


@pytest.mark.parametrize("environ", [{}, faults.arming({})])
def test_without_a_fault_everything_goes_through_as_it_is(environ: dict[str, str]) -> None:
    none = plugin.read(environ)
    model, made, stream = object(), lambda: None, object()
    assert none.model(model, str) is model
    assert none.maker(made) is made
    assert none.stream(stream) is stream
    assert (none.armed, none.observers()) == ([], [])


@pytest.mark.parametrize("text", ["no.such.module {}", 'tests.support.faults {"slow_stp": {"ms": 5}}'])
def test_a_plugin_that_cannot_be_read_refuses_the_start(text: str) -> None:
    done = run_app("dynamic", "--model", "gpt2", EB_PLUGIN=text)
    assert done.returncode == 2
    assert text[:12] in done.stderr or "slow_stp" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bare_value_is_the_main_parameter_and_true_is_none() -> None:
    armed = read(slow_step=5, poison="X", fail_once=True, raise_in_loop="BaseException")
    assert (armed.slow_step, armed.poison) == (faults.Slow(ms=5), faults.Matching(prompt_contains="X"))
    assert armed.armed == ["fail_once", "poison", "raise_in_loop", "slow_step"]


def test_a_poisoned_prompt_breaks_each_step_that_it_is_in() -> None:
    model = faulty(poison={"prompt_contains": "X"})
    assert model.forward(plan_of("ab", "cd")) == [97, 97]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="armed"):
            model.forward(plan_of("ab", "aXb"))


def test_a_fault_waits_for_its_step_and_comes_as_often_as_it_may() -> None:
    model = faulty(fail_always={"after": 2, "times": 1})
    kinds = []
    for _ in range(4):
        try:
            model.forward(plan_of("a"))
            kinds.append("fine")
        except RuntimeError:
            kinds.append("failed")
    assert kinds == ["fine", "fine", "failed", "fine"]


@pytest.mark.parametrize("fault", ["fail_always", "sticky"])
def test_what_is_broken_for_good_stays_so_for_everybody(fault: str) -> None:
    model = faulty(**{fault: {"prompt_contains": "X"}})
    assert model.forward(plan_of("a")) == [97]
    for prompt in ("X", "a"):
        with pytest.raises(RuntimeError):
            model.forward(plan_of(prompt))


@pytest.mark.parametrize(
    ("armed", "prompts", "words"),
    [
        ({"oom_once": {}}, ["a"], "out of memory"),
        ({"oom_above": {"batch": 1}}, ["a", "b"], "out of memory"),
        ({"oom_for": {"prompt_contains": "b"}}, ["a", "b"], "out of memory"),
        ({"sticky": {}}, ["a"], "CUDA error"),
        ({"fail_once": {}}, ["a"], "armed"),
        ({"raise_in_loop": {}}, ["a"], "armed"),
        ({"raise_in_loop": {"error": "BaseException"}}, ["a"], "armed"),
    ],
)
def test_each_fault_of_a_step_raises_what_it_stands_for(armed: dict[str, Any], prompts: list[str], words: str) -> None:
    with pytest.raises(BaseException, match=words):
        faulty(**armed).forward(plan_of(*prompts))


def test_a_row_that_is_not_a_number_is_the_fault_of_its_prompt_alone() -> None:
    outputs = faulty(nan_row={"prompt_contains": "X"}).forward(plan_of("a", "X"))
    assert outputs[0] == 97
    assert isinstance(outputs[1], ValueError)


@pytest.mark.parametrize("does", ["raise", "block"])
def test_a_log_that_nobody_takes_raises_or_blocks(does: str) -> None:
    armed = read(sink={"does": does})
    assert len(armed.observers()) == (does == "raise")
    if does == "raise":
        with pytest.raises(OSError, match="No space"):
            armed.stream(None).write("x")  # type: ignore[arg-type]


def test_an_answer_that_cannot_be_read_raises_in_the_loop_and_in_the_handler() -> None:
    engine = fake_engine()
    make = read(bad_detokenize="X").maker(engine.make_inference)
    assert make("fine", 1, [1]).text.text([97]) == "a"
    bad = make("X", 1, [1], stop_texts=["."])
    for act in (bad.text.text, bad.text.feed, bad.sequence.stop, bad.text.growing().feed):
        with pytest.raises(ValueError, match="armed"):
            act([97])
    engine.manager.stop()


def test_a_lost_word_of_the_end_is_lost_once() -> None:
    engine = fake_engine()
    lost = read(lose_event={"prompt_contains": "X"}).maker(engine.make_inference)("X", 1, [1])
    assert (lost.finished(), lost.is_finished) == (False, False)
    assert (lost.finished(), lost.is_finished) == (True, True)
    engine.manager.stop()


def test_what_cannot_be_said_at_the_start_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", full)
    banner.warn("nobody can read this")
    with contextlib.suppress(OSError):  # closing writes what is left
        full.close()

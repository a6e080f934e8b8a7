"""The hook, file and line that the code of a policy has reached, in an error and on a stack."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import Any

import pytest

import policies
from scheduling.located import Place, described, locate
from scheduling.policy import Policy
from scheduling.sequence import Sequence

OWN = """
import functools
import statistics
from scheduling import policy

def work(values):
    return statistics.mean(values)

def timed(hook):
    @functools.wraps(hook)
    def wrapper(*args):
        return hook(*args)
    return wrapper

class Policy(policy.Policy):
    def order(self, waiting, now):
        yield from waiting
        work([])
    @timed
    def admit(self, waiting, running, budget, now):
        return work([])
    def on_arrival(self, seq, now):
        sum(1 / 0 for _ in (1,))
"""


def place_of(call: Callable[[], Any]) -> Place | None:
    try:
        call()
    except Exception as error:
        return locate(walk_tb(error.__traceback__))
    raise AssertionError("no error")


@pytest.fixture
def own(tmp_path: Path) -> Policy:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return policies.get_policy(str(path), 2)


def test_the_innermost_line_of_the_policys_file_is_found(own: Policy, tmp_path: Path) -> None:
    line = OWN.splitlines().index("    return statistics.mean(values)") + 1
    wanted = str(tmp_path / "mine.py"), line
    assert place_of(lambda: list(own.order([], 0))) == ("order", *wanted)
    assert place_of(lambda: own.admit([], [], None, 0)) == ("admit", *wanted)  # type: ignore[arg-type]


def test_a_hook_called_by_a_default_is_the_one_that_the_scheduler_called(own: Policy) -> None:
    place = place_of(lambda: own.on_preempt(Sequence([0], 1), 0))
    assert place is not None
    assert (place.hook, OWN.splitlines()[place.line - 1].strip()) == ("on_preempt", "sum(1 / 0 for _ in (1,))")


def test_a_hook_of_an_order_is_found_in_the_file_of_the_order() -> None:
    policy = policies.get_policy("dynamic+vtc", 2)
    place = place_of(lambda: policy.on_token(None, 0))  # type: ignore[arg-type]
    assert place is not None
    assert (place.hook, Path(place.file).name) == ("on_token", "vtc.py")
    assert str(place) == f"on_token() of vtc.py, line {place.line}"


def test_a_stack_gives_the_same_line_as_an_error() -> None:
    places: list[Place | None] = []

    def helper() -> None:
        places.append(locate(walk_stack(sys._getframe())))

    class Mine(Policy):
        def _first(self, waiting: Any, now: float) -> Any:
            helper()

        order = _first

    Mine(1).order([], 0)
    source, start = inspect.getsourcelines(helper)
    assert places == [Place("order", __file__, start + len(source) - 1)]


def test_an_error_outside_any_hook_is_of_no_policy(own: Policy) -> None:
    assert place_of(lambda: own.order()) is None  # type: ignore[call-arg]
    assert place_of(functools.partial(int, "x")) is None
    assert locate([]) is None


def test_an_error_whose_own_text_fails_is_named_by_its_type() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert [described(error) for error in (Mute(), KeyError(1))] == ["Mute", "KeyError: 1"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("seq.max_token", "Did you mean 'max_tokens'?"),
        ("math.inf", "Write `import math` at the top of the file"),
        ("witing", "Did you mean 'waiting'?"),
        ("nothing_like_it", "Define or import it"),
        ("__import__('scheduling.optins')", "Did you mean 'scheduling.options'?"),
        ("__import__('xylophone')", "Install xylophone, or do without it"),
    ],
)
def test_an_unknown_name_has_a_remedy(code: str, words: str) -> None:
    with pytest.raises((AttributeError, NameError, ImportError)) as error:
        eval(code, {}, {"seq": Sequence([0], 1), "waiting": []})
    assert described(error.value).endswith(f" ({words})")

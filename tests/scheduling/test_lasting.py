"""How long a call of a hook lasts: the same call, not calls of the same hook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from scheduling.lasting import LastingCall
from scheduling.policy import Policy


class Looking(Policy):
    """A policy whose hooks look at themselves, three times a call and a second apart."""

    def __init__(self, look: Callable[[], float]) -> None:
        super().__init__(4)
        self.look = look

    def order(self, waiting: object, now: float) -> list[float]:  # type: ignore[override]
        return [self._helper() for _ in range(3)]

    def release(self, running: object) -> Iterator[float]:  # type: ignore[override]
        for _ in range(3):
            yield self._helper()

    def _helper(self) -> float:
        return self.look()


def made() -> tuple[Looking, LastingCall]:
    call = LastingCall()
    return Looking(lambda: call.look(sys._getframe(1), 1.0)), call


def test_only_looks_at_the_same_call_add_up() -> None:
    policy, call = made()
    assert policy.order((), 0) == [0, 1, 2]
    assert call.place.startswith("order() of test_lasting.py, line ")
    assert policy.order((), 0) == [0, 1, 2]


def test_a_generator_is_one_call_until_it_ends() -> None:
    policy, _ = made()
    assert list(policy.release(())) == [0, 1, 2]


def test_without_a_hook_nothing_lasts() -> None:
    call = LastingCall()
    assert [call.look(sys._getframe(), 1.0) for _ in range(2)] == [0, 0]
    assert [call.look(None, 1.0), call.place] == [0, ""]

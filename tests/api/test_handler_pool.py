"""The threads that handlers run in: few at once, and more when those wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from launch.worker.handler_pool import AT_ONCE, HandlerPool
from tests.support import wait_until


def blocked(pool: HandlerPool, number: int) -> tuple[threading.Event, list[int]]:
    """Submit tasks that wait until the event is set; return it, and what lists those that began."""
    gate, begun = threading.Event(), []

    def task(i: int) -> None:
        begun.append(i)
        gate.wait(60)

    for i in range(number):
        pool.submit(task, i)
    return gate, begun


def test_only_a_few_handlers_run_at_once() -> None:
    gate, begun = blocked(HandlerPool(50), 20)
    wait_until(lambda: len(begun) == AT_ONCE)
    assert sorted(begun) == [*range(AT_ONCE)]
    gate.set()
    wait_until(lambda: len(begun) == 20)


def test_handlers_that_wait_make_room_for_others_up_to_the_number_of_threads() -> None:
    pool = HandlerPool(12)
    gate, begun = blocked(pool, 20)

    def relieved(number: int) -> Callable[[], bool]:
        return lambda: pool.relieve() is None and len(begun) == number

    wait_until(relieved(12))
    for _ in range(20):
        pool.relieve()
    assert len(begun) == 12
    gate.set()
    wait_until(relieved(20))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_task_that_fails_harms_no_other() -> None:
    pool, done = HandlerPool(1), threading.Event()
    pool.submit(lambda: 1 / 0)
    pool.submit(done.set)
    assert done.wait(60)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_tasks_wait_for_the_threads_there_are_when_the_system_starts_no_more(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pool = HandlerPool(8)
    gate, begun = blocked(pool, 1)

    def fail(thread: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", fail)
    done = threading.Event()
    pool.submit(done.set)
    assert not done.is_set()
    gate.set()
    assert done.wait(60)
    assert begun == [0]

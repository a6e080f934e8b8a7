"""The watchdog, the limit on restarts, and requests of a loop that hangs or has ended."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from types import FrameType

import pytest

from batching import InferenceError
from scheduling.policy import Policy
from serving.watchdog import CHECK_SECONDS, MAX_FAILURES, RestartLimiter, Watchdog
from tests.support import SOON
from tests.support.faults import lose_event
from tests.support.serving import Serve, is_answered, kind_of


class Loop:
    """A loop whose heartbeat the test controls."""

    def __init__(self) -> None:
        self.heartbeat = 0.0
        self.has_thread = True
        self.is_alive = True
        self.given_up: list[str] = []
        self.thread: threading.Thread | None = None

    @property
    def frame(self) -> FrameType | None:
        return None if self.thread is None else sys._current_frames()[self.thread.ident or 0]

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.is_alive = False


class Watched:
    """A loop, its watchdog, and a clock that only the test moves."""

    def __init__(self, stall_seconds: float = 10.0) -> None:
        self.loop = Loop()
        self.now = 0.0
        self.dumps = 0
        self.dog = Watchdog(self.loop, stall_seconds, lambda: self.now, self.dump)

    def dump(self) -> None:
        self.dumps += 1

    def pass_by(self, seconds: float, beats: bool = False) -> None:
        for _ in range(int(seconds / CHECK_SECONDS)):
            self.now += CHECK_SECONDS
            self.loop.heartbeat += beats
            self.dog.check()


def test_a_loop_that_hangs_logs_its_stacks_once_and_is_given_up_after_twice_as_long() -> None:
    watched = Watched()
    watched.pass_by(9.0)
    assert watched.dumps == 0
    watched.pass_by(10.0)
    assert (watched.dumps, watched.loop.given_up) == (1, [])
    watched.pass_by(1.0)
    assert (watched.dumps, watched.loop.given_up) == (1, ["the batching loop has not completed a step for 20 s"])
    assert not watched.dog.check()


def test_a_loop_that_hangs_a_second_time_logs_its_stacks_again() -> None:
    watched = Watched()
    for times in (1, 2):
        watched.pass_by(15.0)
        watched.pass_by(1.0, beats=True)
        assert (watched.dumps, watched.loop.given_up) == (times, [])


def test_a_hook_that_does_not_return_is_named_once_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    is_inside, may_return = threading.Event(), threading.Event()

    class Waiting(Policy):
        def admit(self, *_: object) -> int:
            is_inside.set()
            return may_return.wait(SOON)

    watched = Watched(100.0)
    watched.loop.thread = threading.Thread(target=Waiting(4).admit)
    watched.loop.thread.start()
    assert is_inside.wait(SOON)
    watched.pass_by(9.0)
    assert caplog.messages == []
    watched.pass_by(80.0)
    may_return.set()
    watched.loop.thread.join(SOON)
    (message,) = caplog.messages
    assert "admit() of test_supervision.py, line" in message


def test_a_step_that_takes_a_minute_names_no_hook(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(100.0)
    watched.loop.thread = threading.current_thread()
    watched.pass_by(60.0)
    assert caplog.messages == []


def test_a_loop_with_a_heartbeat_goes_on_and_a_process_suspended_for_an_hour_has_not_hung() -> None:
    watched = Watched()
    watched.pass_by(100.0, beats=True)
    watched.now += 3600.0
    assert watched.dog.check()
    assert (watched.dumps, watched.loop.given_up) == (0, [])


@pytest.mark.parametrize(
    ("is_alive", "said"), [(True, ["the thread of the batching loop has ended"]), (False, [])], ids=["at once", "twice"]
)
def test_a_loop_whose_thread_has_ended_is_given_up_once(is_alive: bool, said: list[str]) -> None:
    watched = Watched()
    watched.loop.is_alive, watched.loop.has_thread = is_alive, False
    assert not watched.dog.check()
    assert watched.loop.given_up == said


def test_the_fifth_failure_within_a_minute_is_one_too_many() -> None:
    now = [0.0]
    limiter = RestartLimiter(lambda: now[0])
    verdicts = []
    for _ in range(MAX_FAILURES):
        verdicts.append(limiter.add())
        now[0] += 14.0
    assert verdicts == [False] * (MAX_FAILURES - 1) + [True]
    now[0] += 30.0
    assert not limiter.add()
    assert limiter.count == MAX_FAILURES + 1


def test_a_forked_process_counts_its_failure_for_the_others() -> None:
    limiter = RestartLimiter()
    child = multiprocessing.get_context("fork").Process(target=limiter.add)
    child.start()
    child.join(SOON)
    assert limiter.count == 1


def test_requests_of_a_loop_that_hangs_end_when_it_is_given_up(serve: Serve) -> None:
    died: list[str] = []
    served = serve("dynamic", on_death=died.append)
    running = served.hold("running", 5)
    waiting = served.ask("waiting", 5)
    served.manager.give_up("it hangs")
    for one in (running, waiting):
        with pytest.raises(InferenceError, match="it hangs") as caught:
            one.wait_for_completion(SOON)
        assert caught.value.kind == "unavailable_error"
    served.manager.give_up("twice")
    served.model.gate.set()
    served.manager.stop()
    served.thread.join(SOON)
    assert died == ["it hangs"]
    assert sorted(served.left) == ["running", "waiting"]


def test_a_lost_completion_is_recovered(serve: Serve) -> None:
    served = serve()
    request = served.hold("a", 3)
    lose_event(request)
    served.model.gate.set()
    assert is_answered(request)


def test_stopping_with_patience_ends_requests_whose_step_takes_too_long(serve: Serve) -> None:
    served = serve("static")
    running = served.hold("running", 5)
    served.manager.stop(patience=0.01)
    assert kind_of(running) == "unavailable_error"
    assert not served.manager.is_alive


def test_a_waiter_learns_of_a_loop_that_ended_without_its_request(serve: Serve) -> None:
    served = serve()
    request = served.hold("a", 3)
    served.manager.inbox.open.clear()
    served.end()
    assert kind_of(request) == "unavailable_error"

"""The watchdog, with a clock that only the test moves; how often engines may die; waiting for a loop that is gone."""

from __future__ import annotations

import multiprocessing

import pytest
from served import SOON, Serve, expected, kind_of

from batching import InferenceError
from launch.faulty import lose_event
from serving.watchdog import CHECK_SECONDS, MAX_FAILURES, RestartLimiter, Watchdog


class Loop:
    """A loop that turns when it is told to."""

    def __init__(self) -> None:
        self.heartbeat = 0.0
        self.has_thread = True
        self.is_alive = True
        self.given_up: list[str] = []

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.is_alive = False


class Watched:
    """A loop, its watchdog, and a clock."""

    def __init__(self, stall_seconds: float) -> None:
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


def test_a_loop_that_turns_is_left_alone() -> None:
    watched = Watched(10.0)
    watched.pass_by(100.0, beats=True)
    assert (watched.dumps, watched.loop.given_up) == (0, [])


def test_a_loop_that_hangs_shows_its_stacks_once_and_is_given_up_after_twice_as_long() -> None:
    watched = Watched(10.0)
    watched.pass_by(9.0)
    assert watched.dumps == 0
    watched.pass_by(10.0)
    assert (watched.dumps, watched.loop.given_up) == (1, [])
    watched.pass_by(1.0)
    assert (watched.dumps, watched.loop.given_up) == (1, ["the batching loop has not completed a step for 20 s"])
    assert not watched.dog.check()


def test_a_loop_that_goes_on_after_its_stacks_were_shown_may_hang_anew() -> None:
    watched = Watched(10.0)
    for times in (1, 2):
        watched.pass_by(15.0)
        watched.pass_by(1.0, beats=True)
        assert (watched.dumps, watched.loop.given_up) == (times, [])


def test_a_process_that_was_stopped_for_an_hour_has_not_hung() -> None:
    watched = Watched(10.0)
    watched.now += 3600.0
    assert watched.dog.check()
    assert (watched.dumps, watched.loop.given_up) == (0, [])


def test_a_loop_whose_thread_is_gone_is_given_up_at_once() -> None:
    watched = Watched(10.0)
    watched.loop.has_thread = False
    assert not watched.dog.check()
    assert watched.loop.given_up == ["the thread of the batching loop has ended"]


def test_a_loop_that_has_ended_by_itself_is_watched_no_more() -> None:
    watched = Watched(10.0)
    watched.loop.is_alive = watched.loop.has_thread = False
    assert not watched.dog.check()
    assert watched.loop.given_up == []


def test_the_fifth_death_within_a_minute_is_one_too_many() -> None:
    now = [0.0]
    deaths = RestartLimiter(lambda: now[0])
    told = []
    for _ in range(MAX_FAILURES):
        told.append(deaths.add())
        now[0] += 14.0
    assert told == [False] * (MAX_FAILURES - 1) + [True]
    now[0] += 30.0
    assert not deaths.add()
    assert deaths.count == MAX_FAILURES + 1


def test_who_was_forked_counts_where_others_see_it() -> None:
    deaths = RestartLimiter()
    child = multiprocessing.get_context("fork").Process(target=deaths.add)
    child.start()
    child.join(SOON)
    assert deaths.count == 1


def test_who_waits_for_a_loop_that_hangs_is_answered_when_it_is_given_up(serve: Serve) -> None:
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


def test_a_lost_word_of_the_end_is_found_again(serve: Serve) -> None:
    served = serve()
    asked = served.hold("a", 3)
    lose_event(asked)
    served.model.gate.set()
    assert asked.wait_for_completion(SOON) == expected("a", 3)


def test_stopping_with_patience_answers_those_whose_step_takes_too_long(serve: Serve) -> None:
    served = serve("static")
    running = served.hold("running", 5)
    served.manager.stop(patience=0.01)
    assert kind_of(running) == "unavailable_error"
    assert not served.manager.is_alive


def test_who_waits_is_told_of_a_loop_that_ended_without_a_word(serve: Serve) -> None:
    served = serve()
    asked = served.hold("a", 3)
    served.manager.inbox.open.clear()
    served.end()
    assert kind_of(asked) == "unavailable_error"

"""A call of the tokenizer that does not return: what the watch reports, and when the process starts again."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from models.text.tokenizer import Tokenizer, load_stand_in
from serving.text_watch import TextWatch
from tests.support import SOON


class Loop:
    """A loop that lives until it is given up."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    @property
    def is_alive(self) -> bool:
        return not self.reasons

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)


class Watched:
    """A watch with a limit of 10 s, its clock, and the call in progress."""

    def __init__(self) -> None:
        self.now, self.dumps, self.loop = 0.0, 0, Loop()
        self.call: object | None = None
        loop: Any = self.loop
        self.watch = TextWatch(lambda: self.call, loop, 10.0, lambda: self.now, self.dump)

    def dump(self) -> None:
        self.dumps += 1

    def run(self, seconds: int, call: object | None) -> bool:
        self.call = call
        return all(self.advance(1.0) for _ in range(seconds))

    def advance(self, seconds: float) -> bool:
        self.now += seconds
        return self.watch.check()


def test_a_call_that_does_not_return_is_reported_once_and_then_ends_the_loop() -> None:
    watched = Watched()
    assert watched.run(9, "call")
    assert watched.watch.stall is None
    assert watched.run(10, "call")
    assert watched.watch.stall is not None
    assert watched.dumps == 1
    assert not watched.run(5, "call")
    assert len(watched.loop.reasons) == 1


def test_a_stall_is_over_when_the_call_returns_and_calls_that_return_never_stall() -> None:
    watched = Watched()
    for seconds, call in ((15, "call"), (1, None), *((9, f"call {number}") for number in range(5)), (40, None)):
        assert watched.run(seconds, call)
        assert (watched.watch.stall is None) == (seconds != 15)


def test_the_time_of_a_suspended_process_does_not_count() -> None:
    watched = Watched()
    watched.run(2, "call")
    assert watched.advance(3600.0)
    assert watched.watch.stall is None


def test_a_tokenizer_knows_its_oldest_call() -> None:
    stand_in = load_stand_in(downloads=False)
    entered, goes_on = threading.Event(), threading.Event()

    def encode(text: str) -> list[int]:
        entered.set()
        assert goes_on.wait(SOON)
        return []

    tokenizer = Tokenizer(replace(stand_in.vocabulary, encode=encode))
    assert tokenizer.oldest_call is None
    thread = threading.Thread(target=tokenizer.encode, args=("x",))
    thread.start()
    assert entered.wait(SOON)
    assert tokenizer.oldest_call is tokenizer.oldest_call is not None
    goes_on.set()
    thread.join(SOON)
    assert tokenizer.oldest_call is None

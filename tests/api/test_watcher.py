"""The watcher of clients: it reports each disconnect once, and survives what goes wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from calls import half_close

from api.http.watcher import Watcher
from tests.support import wait_until


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


Pair = tuple[socket.socket, socket.socket]


def hang_up(sock: socket.socket) -> None:
    sock.close()


def leave_bytes_behind(sock: socket.socket) -> None:
    sock.sendall(b"the next request")
    sock.close()


@pytest.mark.parametrize(
    ("act", "peeks"),  # peeking cannot see beyond bytes that nobody has read
    [(hang_up, False), (hang_up, True), (half_close, False), (half_close, True), (leave_bytes_behind, False)],
)
def test_a_hang_up_is_told_once(pair: Pair, act: Any, peeks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if peeks:  # as where there is no EPOLLRDHUP
        monkeypatch.delattr("select.EPOLLRDHUP")
        monkeypatch.setattr("api.http.watcher.PEEK_SECONDS", 0.01)
    ours, theirs = pair
    told: list[int] = []
    watcher = Watcher()
    number = watcher.add(ours, told.extend, 1)
    assert told == []
    act(theirs)
    wait_until(lambda: told)
    watcher.remove(number)
    assert told == [1]


def test_who_is_removed_is_not_watched_and_its_number_can_be_used_again(pair: Pair) -> None:
    ours, theirs = pair
    told: list[str] = []
    watcher = Watcher()
    for name in ("first", "second"):
        number = watcher.add(ours, told.extend, name)
        assert number == ours.fileno()
        if name == "first":
            watcher.remove(number)
            watcher.remove(number)
    theirs.close()
    wait_until(lambda: told)
    assert told == ["second"]


def test_a_callback_that_raises_does_not_end_the_watch(pair: Pair) -> None:
    def fail(gone: list[Any]) -> None:
        raise KeyError

    watcher = Watcher()
    ours, theirs = pair
    watcher.add(ours, fail, 0)
    theirs.close()
    mine, other = socket.socketpair()
    with mine, other:
        told: list[int] = []
        watcher.add(mine, told.extend, 1)
        other.close()
        wait_until(lambda: told)


def test_those_who_hang_up_at_once_are_told_of_at_once(pair: Pair) -> None:
    ours, theirs = pair
    is_busy, may_go_on = threading.Event(), threading.Event()

    def dawdle(gone: list[Any]) -> None:
        is_busy.set()
        may_go_on.wait(60)

    watcher = Watcher()
    watcher.add(ours, dawdle, 0)
    theirs.close()
    assert is_busy.wait(60)
    told: list[list[Any]] = []
    with ExitStack() as stack:
        for i in range(20):
            mine, other = socket.socketpair()
            stack.enter_context(mine)
            watcher.add(mine, told.append, i)
            other.close()
        may_go_on.set()
        wait_until(lambda: told)
    assert [sorted(each) for each in told] == [list(range(20))]

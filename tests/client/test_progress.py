"""How far a long command is: what a terminal and what a log get of it."""

from __future__ import annotations

import io
import itertools
import threading
import time

import pytest
from rich.console import Console

from terminal import progress
from terminal.progress import Reporter, Stages, State


def reported(monkeypatch: pytest.MonkeyPatch, terminal: bool, after: float) -> str:
    """Return what is shown of a command that is over soon after its third state has been read."""
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0.001)
    reads, third = itertools.count(1), threading.Event()

    def state() -> State:
        done = next(reads)
        if done == 3:
            third.set()
        return State(done, 9, f"{done} of 9")

    out = io.StringIO()
    with Reporter(Console(file=out, force_terminal=terminal, width=60), state, after=after):
        if after < 1:
            assert third.wait(60)
    return out.getvalue()


def test_a_log_gets_lines_and_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(monkeypatch, terminal=False, after=0.001).splitlines()[:3] == ["1 of 9", "2 of 9", "3 of 9"]
    monkeypatch.setenv("TERM", "xterm")
    drawn = reported(monkeypatch, terminal=True, after=0.001)
    assert "3 of 9" in drawn
    assert "━" in drawn


def test_a_count_of_an_unknown_total_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    with Reporter(Console(file=out, force_terminal=True, width=60), lambda: State(1234, None, "1,234 runs"), after=0.0):
        pass
    assert "1,234 runs" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_command_that_is_over_soon_shows_nothing(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    assert reported(monkeypatch, terminal, after=60) == ""


def test_the_time_left_is_that_of_the_pace_so_far() -> None:
    assert progress.remaining(10, 40, 5.0) == "15 s"
    assert progress.remaining(1, 101, 6.0) == "10 min"


def test_a_stage_is_named_with_its_count_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    stages = Stages("starting")
    assert stages._read() == State(0, None, "starting, 0 s")
    stages.at("packing weights", lambda: 3, 24, "layers")
    assert stages._read() == State(3, 24, "packing weights: 3 of 24 layers, 0 s")

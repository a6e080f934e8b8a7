"""How far a long command is: a bar on a terminal, otherwise a line every five seconds.

A thread of its own draws it, so that a slow terminal delays neither a send nor a step. This module must not know what is
counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

PATIENCE = 2.0  # seconds: a command that is over sooner shows nothing
REDRAWS_A_SECOND = 4
PLAIN_LINE_SECONDS = 5.0


class State(NamedTuple):
    """How much is done of how much (None: nobody knows), and the same in words."""

    done: float
    total: float | None
    text: str


class Reporter(threading.Thread):
    """Shows what `read` returns, from `after` seconds on until it is closed; `stays`: leave the last state on screen."""

    def __init__(
        self, console: Console, read: Callable[[], State], after: float = PATIENCE, stays: bool = False
    ) -> None:
        super().__init__(name="progress", daemon=True)
        self._console, self._read, self._after, self._stays = console, read, after, stays
        self._over = threading.Event()

    def __enter__(self) -> Reporter:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last state and stop."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Draw until closed."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            wait = self._after or PLAIN_LINE_SECONDS
            while not self._over.wait(wait):
                self._console.print(self._read().text, markup=False, emoji=False, highlight=False, soft_wrap=True)
                wait = PLAIN_LINE_SECONDS
        elif not (self._after and self._over.wait(self._after)):
            self._bar()

    def _bar(self) -> None:
        columns = (BarColumn(bar_width=16), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self._console, auto_refresh=False, transient=not self._stays) as progress:
            self._console.show_cursor(True)  # a process that is killed meanwhile could not bring it back
            task = progress.add_task("")
            over = False
            while not over:
                over = self._over.wait(1 / REDRAWS_A_SECOND)
                state = self._read()
                progress.update(task, completed=state.done, total=state.total, description=state.text, refresh=True)


class Stages(Reporter):
    """Shows on stderr the stage that a command is at, how much of it is done, and the time since the beginning."""

    def __init__(self, first: str) -> None:
        super().__init__(Console(stderr=True), lambda: self._state())
        self._began = time.monotonic()
        self.at(first)

    def at(self, text: str, done: Callable[[], int] = lambda: 0, total: int = 0, unit: str = "") -> None:
        """Begin a stage, of which `done` returns how many of `total` units are done; 0 where there is nothing to count."""

        def state() -> State:
            number, seconds = done(), time.monotonic() - self._began
            counted = f"{text}: {number:,} of {total:,} {unit}" if total else text
            return State(number, total or None, f"{counted}, {seconds:.0f} s")

        self._state = state


@contextmanager
def counted(console: Console, total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` are done, if that is known; yield the function that is given this number."""
    began, done = time.monotonic(), 0

    def state() -> State:
        if total is None:
            return State(done, None, f"{done:,} {what}")
        text = f"{done:,} of {total:,} {what}"
        return State(done, total, text + (f", ETA {remaining(done, total, time.monotonic() - began)}" if done else ""))

    def update(number: int) -> None:
        nonlocal done
        done = number

    with Reporter(console, state):
        yield update


def remaining(done: float, total: float, seconds: float) -> str:
    """Return the time that is left, if the rest goes on as it began."""
    return duration((total - done) * seconds / done)


def duration(seconds: float) -> str:
    """Return a time in seconds, or in minutes where it has many of them."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

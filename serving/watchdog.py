"""Who looks whether the loop still turns, and how often an engine may be started anew.

It must not know HTTP, tensors or gunicorn: what to do at the end is passed in.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
DEATHS = 5  # so many deaths of the engine within
DEATH_SECONDS = 60.0  # are a reason not to start another


class Loop(Protocol):
    """A loop in a thread: `beat` changes with each turn, which comes at least each second while nothing is to do."""

    beat: float

    @property
    def has_thread(self) -> bool: ...
    @property
    def is_alive(self) -> bool: ...
    def give_up(self, reason: str) -> None: ...


def dump_stacks() -> None:
    """Write what each thread does to stderr."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


class Watchdog:
    """Gives a loop up that has died without a word, or has not turned for twice `stall_seconds`.

    Time counts only while it looks itself, so that a process that was stopped for a while has not hung.
    """

    def __init__(
        self,
        loop: Loop,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        dump: Callable[[], None] = dump_stacks,
    ) -> None:
        self._loop = loop
        self._limit = stall_seconds
        self._clock = clock
        self._dump = dump
        self._beat = loop.beat
        self._looked = clock()
        self._still = 0.0  # seconds that the loop has been seen not to turn
        self._has_dumped = False

    def start(self) -> None:
        """Look again and again, in a thread of its own, until the loop has ended."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while self.look():
            pause.wait(min(LOOK_SECONDS, self._limit / 4))

    def look(self) -> bool:
        """Look once; False when there is nothing to watch any more."""
        now, beat = self._clock(), self._loop.beat
        if not self._loop.is_alive:
            return False
        if not self._loop.has_thread:
            self._loop.give_up("the thread of the batching loop has ended")
            return False
        if beat != self._beat:
            self._beat, self._still, self._has_dumped = beat, 0.0, False
        else:
            self._still += min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        if self._still >= self._limit and not self._has_dumped:
            self._has_dumped = True
            log.error(
                "the batching loop has not completed a step for %.0f s; thread stacks follow",
                self._still,
            )
            self._dump()
        if self._still >= 2 * self._limit:
            self._loop.give_up(
                f"the batching loop has not completed a step for {self._still:.0f} s"
            )
            return False
        return True


class Deaths:
    """When engines died, in memory that a worker shares with the process that it was forked from."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")

    @property
    def count(self) -> int:
        """How many engines have died."""
        return int(self._shared[0])

    def add(self) -> bool:
        """Note that one dies now; whether that is too often for another."""
        now, count = self._clock(), self.count
        self._shared[1 + count % DEATHS] = now
        self._shared[0] = count + 1
        oldest = self._shared[1 + (count + 1) % DEATHS]
        return count + 1 >= DEATHS and now - oldest < DEATH_SECONDS

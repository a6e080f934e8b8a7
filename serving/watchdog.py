"""The watches over what may hang, among them the watchdog of the batching loop, and the limit on restarts of the engine.

This module must not know HTTP, tensors or gunicorn: the caller passes what to do on a failure.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from scheduling.lasting import LastingCall

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
HOOK_SECONDS = 10.0  # for which one call of a policy's hook lasts until it is named in the log
# The engine is not restarted after this many failures within this many seconds.
MAX_FAILURES = 5
FAILURE_SECONDS = 60.0


class Watched(Protocol):
    """A loop in a thread: `heartbeat` changes in each iteration, at least every second when idle."""

    @property
    def heartbeat(self) -> float: ...
    @property
    def has_thread(self) -> bool: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def frame(self) -> FrameType | None: ...
    def give_up(self, reason: str) -> None: ...


def dump_stacks() -> None:
    """Write the stack of each thread to stderr."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


class Watch:
    """Dumps all stacks when something has stood still for `limit` seconds, and gives up the loop after twice as many.

    Time counts only while the watch itself runs, so a process that was suspended does not count as hung.
    """

    name, rest = "", ""  # of its thread; of the reason why the loop was given up

    def __init__(
        self,
        loop: Watched,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        dump: Callable[[], None] = dump_stacks,
    ) -> None:
        self.seconds = 0.0  # for which it has stood still
        self._loop, self._limit, self._clock, self._dump = loop, limit, clock, dump
        self._seen = self.look()
        self._checked_at = clock()
        self._has_dumped = False

    def look(self) -> object | None:
        """Return what stands still as long as this is the same; None if nothing can."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        """The message that says what is hung and for how long."""
        raise NotImplementedError

    def start(self) -> None:
        """Check in a separate thread until the loop has ended."""
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while self.check():
            pause.wait(min(CHECK_SECONDS, self._limit / 4))

    def check(self) -> bool:
        """Check once; return False when the loop has ended."""
        now, seen = self._clock(), self.look()
        if not self._loop.is_alive:
            return False
        passed, self._checked_at = min(now - self._checked_at, 2 * CHECK_SECONDS), now
        if seen is None or seen != self._seen:
            self._seen, self.seconds, self._has_dumped = seen, 0.0, False
        else:
            self.seconds += passed
        if self.seconds >= self._limit and not self._has_dumped:
            self._has_dumped = True
            log.error("%s; thread stacks follow", self.words)
            self._dump()
        if self.seconds >= 2 * self._limit:
            self._loop.give_up(self.words + self.rest)
            return False
        return True


class Watchdog(Watch):
    """Ends a loop whose thread has died, or that has completed no iteration for twice its limit.

    A hook of the policy that does not return is named after HOOK_SECONDS.
    """

    name = "watchdog"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._call, self._has_named = LastingCall(), False

    def look(self) -> float:
        return self._loop.heartbeat

    @property
    def words(self) -> str:
        return f"the batching loop has not completed a step for {self.seconds:.0f} s"

    def check(self) -> bool:
        """See `Watch.check`."""
        if self._loop.is_alive and not self._loop.has_thread:
            self._loop.give_up("the thread of the batching loop has ended")
            return False
        before, goes_on = self.seconds, super().check()
        if self.seconds > before:
            self._name_hook(self.seconds - before)
        else:
            self._call = LastingCall()  # it keeps a frame, and so all requests that the hook was called with
        return goes_on

    def _name_hook(self, passed: float) -> None:
        """Log once where a call of a hook is that does not return."""
        lasts = self._call.look(self._loop.frame, passed)
        self._has_named &= lasts > 0
        if lasts >= HOOK_SECONDS and not self._has_named:
            self._has_named = True
            log.error(
                "the policy has not returned for %.0f s from %s. No request is computed meanwhile. Correct the policy and "
                "restart the server", lasts, self._call.place,
            )  # fmt: skip


class RestartLimiter:
    """The times of engine failures, in memory that workers share with the master process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")

    @property
    def count(self) -> int:
        """The number of engine failures."""
        return int(self._shared[0])

    def add(self) -> bool:
        """Record a failure; return whether there were too many for another restart."""
        now, count = self._clock(), self.count
        self._shared[1 + count % MAX_FAILURES] = now
        self._shared[0] = count + 1
        oldest = self._shared[1 + (count + 1) % MAX_FAILURES]
        return count + 1 >= MAX_FAILURES and now - oldest < FAILURE_SECONDS

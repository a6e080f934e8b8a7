"""The limit on a call of a policy's hook in the laboratory: a policy whose loop never ends gets a sentence.

A timer looks twice a second at what the main thread executes, so that a call costs nothing more. A call that a look finds
again and again for LIMIT seconds gets a HookTimeout; if it catches that, too, the process ends GRACE seconds later.
Python calls a signal handler between two of its instructions, so a single call in C, such as sum(range(10**12)), is
stopped only when it returns. This module must not know commands.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from scheduling.lasting import LastingCall

LIMIT = 5.0  # seconds, a thousand times what a hook needs
GRACE = 2.0
LOOK_EVERY = 0.5
SHOW_CURSOR = "\x1b[?25h"


class HookTimeout(BaseException):
    """A hook has not returned in time. It is no Exception, which a policy may well catch."""


class HookLimit:
    """Looks at the main thread and stops a call that has taken `seconds`."""

    def __init__(self, seconds: float = LIMIT) -> None:
        self._limit = seconds
        self._look_every = min(LOOK_EVERY, seconds / 4)
        self._call = LastingCall()
        self._looked_at = 0.0
        self._has_raised = False

    def start(self) -> None:
        """Begin to look; only the main thread may."""
        self._looked_at = time.monotonic()
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self._look_every, self._look_every)

    def stop(self) -> None:
        """Stop looking."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # A process that was suspended has not computed meanwhile.
        now, longest = time.monotonic(), 2 * self._look_every
        passed, self._looked_at = min(now - self._looked_at, longest), now
        taken = self._call.look(frame, passed)
        self._has_raised &= taken > 0
        if taken < self._limit:
            return
        words = f"{self._call.place}, took more than {self._limit:g} s. Look for a loop whose condition stays true"
        if taken >= self._limit + GRACE:
            _end(words)
        if not self._has_raised:
            self._has_raised = True
            raise HookTimeout(words)


def _end(words: str) -> None:
    """Print an error and end the process at once: whatever is raised here, the policy catches it."""
    sys.stderr.write(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}\nerror: {words}\n")
    sys.stderr.flush()
    os._exit(1)


def begin() -> None:
    """Limit the hooks for as long as a worker process lives, whose main thread this is; what they print goes to stderr."""
    sys.stdout = sys.stderr
    HookLimit().start()


@contextmanager
def limited(seconds: float = LIMIT) -> Iterator[None]:
    """Limit each call of a hook that the main thread makes; elsewhere, and without such timers, nothing is limited."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before, limit = signal.getsignal(signal.SIGALRM), HookLimit(seconds)
    limit.start()
    try:
        yield
    finally:
        limit.stop()
        signal.signal(signal.SIGALRM, before)

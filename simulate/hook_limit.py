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
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import policies
from scheduling.located import locate

Stack = list[tuple[FrameType, int]]

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
        self._call: FrameType | None = None  # kept, so that no other call's frame gets its place in memory
        self._taken = 0.0
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
        self._call = None

    def _look(self, number: int, frame: FrameType | None) -> None:
        # A process that was suspended has not computed meanwhile.
        now, longest = time.monotonic(), 2 * self._look_every
        passed, self._looked_at = min(now - self._looked_at, longest), now
        stack = list(walk_stack(frame))
        call = _call_in(stack)
        if call is None or call is not self._call:
            self._call, self._taken, self._has_raised = call, 0.0, False
            return
        self._taken += passed
        if self._taken < self._limit:
            return
        words = f"{_place(call, stack)}, took more than {self._limit:g} s. Look for a loop whose condition stays true"
        if self._taken >= self._limit + GRACE:
            _end(words)
        if not self._has_raised:
            self._has_raised = True
            raise HookTimeout(words)


def _call_in(stack: Stack) -> FrameType | None:
    """Return the call of a hook, or else the run of a policy's file that is being loaded; `stack` begins with the innermost."""
    is_loading = False
    for frame, line in reversed(stack):
        is_loading |= frame.f_globals.get("__name__") == policies.__name__
        if locate([(frame, line)]) or (is_loading and frame.f_code.co_name == "<module>"):
            return frame
    return None


def _place(call: FrameType, stack: Stack) -> str:
    """Return the line that a call has reached, with the hook where there is one."""
    file = call.f_code.co_filename
    line = next(line for frame, line in stack if frame.f_code.co_filename == file)
    return str(locate(stack) or f"{Path(file).name}, line {line}")


def _end(words: str) -> None:
    """Print an error and end the process at once: whatever is raised here, the policy catches it."""
    sys.stderr.write(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}\nerror: {words}\n")
    sys.stderr.flush()
    os._exit(1)


def begin() -> None:
    """Limit the hooks for as long as a worker process lives, whose main thread this is."""
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

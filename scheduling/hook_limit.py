"""A limit on how long a policy's hooks may keep the main thread: a loop that never ends gets a HookTimeout.

A timer looks at what the main thread executes, so that a call costs nothing more. Python calls a signal handler between two
of its instructions, so a single call in C, such as sum(range(10**12)), is stopped only when it returns. This module must
not know threads, or what becomes of a policy that was stopped; it is given the clock.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from scheduling.lasting import LastingCall

LOOK_EVERY = 0.5  # seconds


class HookTimeout(BaseException):
    """A hook has not returned in time. It is no Exception, which a policy may well catch."""


class HookLimit:
    """Watches the main thread, and raises HookTimeout in a hook that runs for `seconds` on `clock`.

    If the hook catches that and runs for `grace` seconds more, `end` is called with the message. Without `end`, the limit
    is on the total time of all hooks since it was entered. The hook that runs when the total is used up is stopped, and
    the total starts again at zero. The handler of the alarm then stays after the limit, since an engine enters it often.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float], grace: float = 0.0, end: Callable[[str], None] | None = None
    ) -> None:
        self._limit, self._clock, self._grace, self._end = seconds, clock, grace, end
        self._look_every = min(LOOK_EVERY, seconds / 4)
        self._call = LastingCall()
        self._has_raised, self._depth = False, 0
        self._handler: Any = None  # whose alarm it was before

    def __enter__(self) -> None:
        """Start watching; only the main thread may. A limit that is entered again inside itself keeps its running total."""
        self._depth += 1
        if self._depth > 1:
            return
        self._passed, self._began_at = 0.0, self._clock()
        self._looked_at = self._began_at
        if self._handler is None:
            self._handler = signal.signal(signal.SIGALRM, self._look)
        self._left = signal.setitimer(signal.ITIMER_REAL, self._look_every, self._look_every)

    def __exit__(self, *error: object) -> None:
        """Stop looking. A timer that ran before goes on, as if this one had not been there."""
        self._depth -= 1
        if self._depth:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._end is not None:
            signal.signal(signal.SIGALRM, self._handler or signal.SIG_DFL)
            self._handler = None
        left, interval = self._left
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left - (self._clock() - self._began_at)), interval)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # A process that was suspended has not computed meanwhile.
        now, longest = self._clock(), 2 * self._look_every
        passed, self._looked_at = min(now - self._looked_at, longest), now
        taken = self._call.look(frame, passed)
        self._passed += passed
        if self._end is None:
            taken = self._passed if self._call.place else 0.0
        self._has_raised &= taken > 0
        if taken < self._limit:
            return
        words = f"{self._call.place}, took more than {self._limit:g} s. Look for a loop whose condition stays true"
        if self._end is not None and taken >= self._limit + self._grace:
            self._end(words)
        if self._end is None or not self._has_raised:
            self._has_raised, self._passed = True, 0.0
            raise HookTimeout(words)

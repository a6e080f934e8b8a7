"""How a reader of streams waits for the loop, and is woken. This module must not know what it reads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Wakeup:
    """Wakes the one reader of some streams. Notifying never blocks, and twice has the same effect as once.

    A reader sets `wants_tokens`, checks for new tokens, and only then waits; in another order it could miss the last
    ones. Without `wants_tokens` only the end of an inference wakes it. With `resume` the reader is a thread that has other
    readers to serve: it is called, and nobody waits.
    """

    __slots__ = ("_lock", "resume", "wants_tokens")

    def __init__(self) -> None:
        self.wants_tokens = False
        self.resume: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        if (resume := self.resume) is not None:
            resume()
            return
        try:
            self._lock.release()
        except RuntimeError:  # already notified, and the reader has not waited since
            return

    def notify_tokens(self) -> None:
        """Wake the reader, once, if it waits for tokens."""
        if self.wants_tokens:
            self.wants_tokens = False
            self.notify()

    def wait(self, seconds: float) -> bool:
        """Wait for a notification; return whether one came before the timeout."""
        return self._lock.acquire(timeout=max(0.0, min(seconds, 3600.0)))

"""Calls that the worker's threads ask of its main thread, and the results that they hand to it.

This module must not know what is called.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from gunicorn.workers.gthread import PollableMethodQueue


class Then(enum.Enum):
    """What to do with a connection once the handler of its request has returned."""

    KEEP = enum.auto()
    CLOSE = enum.auto()
    PENDING = enum.auto()  # the connection belongs to the completer, which will answer

    @classmethod
    def of(cls, resp: Any) -> Then:
        """Return what gunicorn's response says."""
        return cls.CLOSE if resp.should_close() else cls.KEEP


class Callbacks(PollableMethodQueue):  # type: ignore[misc]
    """Calls that other threads ask of the main thread; it wakes once for many of them."""

    _signaled = False

    def defer(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call a function in the main thread soon."""
        self._queue.put(partial(callback, *args))
        if not self._signaled:
            self._signaled = True
            with contextlib.suppress(OSError):  # closed: the worker is exiting
                os.write(self._write_fd, b"\0")

    def run_callbacks(self, _fileobj: Any, max_callbacks: int = 50) -> None:
        """Make the calls that are queued by now."""
        os.read(self._read_fd, 4096)
        self._signaled = False  # before the queue is read, so that a later call wakes the thread again
        for _ in range(self._queue.qsize()):
            self._queue.get_nowait()()

"""The thread pool of request handlers. This module must not know what they do."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
AT_ONCE = 4  # computing handlers; more would only compete for the interpreter
BUSY_SECONDS = 0.005  # after which a handler counts as blocked, and another may run

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class Turn:
    """The right to run tasks, one after the other; `began` is the start time of the current one."""

    __slots__ = ("began",)

    def __init__(self) -> None:
        self.began = time.monotonic()


class HandlerPool:
    """Runs tasks in up to `most` threads: a few at once, and more when those block.

    It costs a third of concurrent.futures' pool, because tasks have no result to wait for. All
    fields are changed with the lock held.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._turns: set[Turn] = set()  # at most AT_ONCE; a blocked thread loses its turn
        self._backlog: deque[Task] = deque()
        self._begun: queue.SimpleQueue[tuple[Turn, Task]] = queue.SimpleQueue()
        self._idle = 0  # waiting threads, minus the tasks already assigned to them
        self._threads = 0

    @property
    def has_backlog(self) -> bool:
        """Whether tasks wait for a thread."""
        return bool(self._backlog)

    def submit(self, task: Callable[..., Any], *args: Any) -> None:
        """Submit a task; raise RuntimeError when the first thread cannot be started."""
        with self._lock:
            self._backlog.append((task, args))
            self._begin()

    def relieve(self) -> None:
        """Give the turns of blocked threads to the backlog; call this every few milliseconds."""
        with self._lock:
            late = time.monotonic() - BUSY_SECONDS
            self._turns = {turn for turn in self._turns if turn.began > late}
            self._begin()

    def shutdown(self, wait: bool = False) -> None:
        """Do nothing: the threads end with the process."""

    def _begin(self) -> None:
        """Give free turns to the backlog; call this with the lock held."""
        while self._backlog and len(self._turns) < AT_ONCE:
            if self._idle <= 0:
                if self._threads == self._most:
                    return
                self._start_thread()
            turn = Turn()
            self._turns.add(turn)
            self._idle -= 1
            self._begun.put((turn, self._backlog.popleft()))

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run, name="handler", daemon=True).start()
        except (RuntimeError, MemoryError):
            if not self._threads:
                raise
            return  # the task waits until a thread is idle
        self._threads += 1
        self._idle += 1

    def _run(self) -> None:
        while True:
            turn, begun = self._begun.get()
            task: Task | None = begun
            while task is not None:
                function, args = task
                try:
                    function(*args)
                except Exception:
                    log.exception("a request handler failed")
                del function, args  # an idle thread must not keep a connection alive
                task = self._next(turn)

    def _next(self, turn: Turn) -> Task | None:
        """Return a thread's next task; None when there is none, or when another thread has taken over."""
        with self._lock:
            if turn in self._turns and self._backlog:
                turn.began = time.monotonic()
                return self._backlog.popleft()
            self._turns.discard(turn)
            self._idle += 1
            self._begin()
        return None

"""The threads that handlers run in. It must not know what they do."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class HandlerPool:
    """Runs tasks at once, each in a thread that is idle or, up to `most` of them, in a new one; else they queue.

    It has a third of the cost of concurrent.futures' pool, since nobody waits for a task's result.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]]
        self._tasks = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._spare = 0  # idle threads less queued tasks
        self._threads = 0

    def submit(self, task: Callable[..., Any], *args: Any) -> None:
        """Run a task in a thread; RuntimeError when it needs the first thread and none can be started."""
        with self._lock:
            self._spare -= 1
            grows = self._spare < 0 and self._threads < self._most
            self._threads += grows
        self._tasks.put((task, args))
        if grows:
            try:
                threading.Thread(target=self._run, name="handler", daemon=True).start()
            except RuntimeError:
                with self._lock:
                    self._threads -= 1
                if not self._threads:
                    raise

    def shutdown(self, wait: bool = False) -> None:
        """Do nothing: the threads end with the process."""

    def _run(self) -> None:
        while True:
            with self._lock:
                self._spare += 1
            task, args = self._tasks.get()
            try:
                task(*args)
            except Exception:
                log.exception("a handler failed")
            del task, args  # not to keep a connection alive while idle

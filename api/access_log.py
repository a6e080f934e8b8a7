"""The access log: a JSON line on stdout for each request; ids, lengths and times, never what was said.

Lines are written by a thread of their own from a bounded queue, so that whoever does not read them harms nobody:
what finds no room is dropped and counted. It must not know the server's state.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import Any, TextIO

ROOM = 4096  # lines


class AccessLog:
    """Takes lines without ever waiting; its thread starts with the first, or by `start`.

    A server starts it at once: when memory has run out, and there is something to say, no thread can be had.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.dropped = 0
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(ROOM)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, record: dict[str, Any]) -> None:
        self.write_text(json.dumps(record, separators=(",", ":")))

    def start(self) -> AccessLog:
        """Begin to write, unless that has happened; RuntimeError when there is no thread to be had."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="access-log", daemon=True)
                thread.start()
                self._thread = thread
        return self

    def write_text(self, line: str) -> None:
        try:
            self.start()
            self._lines.put_nowait(line)
        except (queue.Full, RuntimeError):
            self.dropped += 1

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until what was said is written, so long at most."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            lines = [self._lines.get()]
            while len(lines) < ROOM and not self._lines.empty():
                lines.append(self._lines.get())
            try:
                stream = self._stream or sys.stdout
                stream.write("\n".join(lines) + "\n")
                stream.flush()
            except (OSError, ValueError, MemoryError):  # a full disk, a closed pipe
                self.dropped += len(lines)
            for _ in lines:
                self._lines.task_done()


class QueuedHandler(logging.Handler):
    """Sends what the server logs through a thread too, so that a full pipe never stops the loop."""

    def __init__(self, log: AccessLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log.write_text(self.format(record))
        except Exception:
            self.handleError(record)

"""A log whose writers never wait: a bounded queue, and a thread that writes lines to a stream.

Lines that find the queue full, or that cannot be written, are dropped and counted. The access log is one: a JSON object
for each request, with ids, lengths and times but no text. This module must not know the server's state.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

CAPACITY = 4096  # lines
GATHER_SECONDS = 0.1  # lines that arrive within this time are written together
_encode = json.JSONEncoder(separators=(",", ":")).encode


class QueuedLog(QueueListener):
    """Writes strings as they are and dictionaries as JSON, from `start` on.

    A server starts it early: once memory is short, a thread may fail to start.
    """

    queue: queue.Queue[str | dict[str, Any]]

    def __init__(self, stream: TextIO) -> None:
        super().__init__(queue.Queue(CAPACITY))
        self.dropped = 0
        self._stream = stream

    def write(self, line: str | dict[str, Any]) -> None:
        """Queue a line, or drop it; never block."""
        try:
            self.queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until all lines are written, but no longer than this."""
        with self.queue.all_tasks_done:
            self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, seconds)

    def dequeue(self, block: bool) -> Any:
        gather = self.queue.empty()
        line = self.queue.get(block)
        if gather:
            time.sleep(GATHER_SECONDS)
        return line

    def handle(self, record: Any) -> None:
        try:
            self._stream.write(f"{record if isinstance(record, str) else _encode(record)}\n")
            if self.queue.empty():
                self._stream.flush()
        except (OSError, ValueError, MemoryError):  # a full disk, a closed pipe
            self.dropped += 1


class QueuedHandler(QueueHandler):
    """Sends log records to a QueuedLog, so that a full pipe never stops the thread that logs."""

    def __init__(self, log: QueuedLog) -> None:
        super().__init__(log.queue)
        self._log = log

    def enqueue(self, record: logging.LogRecord) -> None:
        self._log.write(record.msg)  # formatted by `prepare`

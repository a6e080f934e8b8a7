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
GATHER_SECONDS = 0.02  # for which lines are gathered before they are written together
_encode = json.JSONEncoder(separators=(",", ":")).encode


class AccessLog:
    """Takes lines without ever waiting; its thread starts with the first, or by `start`.

    A server starts it at once: when memory has run out, and there is something to say, no thread can be had.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.dropped = 0
        self._stream = stream
        # Lines, records to encode, and events to set when all before them is written.
        self._lines: queue.SimpleQueue[str | dict[str, Any] | threading.Event]
        self._lines = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, record: dict[str, Any]) -> None:
        self._put(record)

    def start(self) -> AccessLog:
        """Begin to write, unless that has happened; RuntimeError when there is no thread to be had."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="access-log", daemon=True)
                thread.start()
                self._thread = thread
        return self

    def write_text(self, line: str) -> None:
        self._put(line)

    def _put(self, line: str | dict[str, Any]) -> None:
        try:
            if self._thread is None:
                self.start()
        except RuntimeError:
            self.dropped += 1
            return
        if self._lines.qsize() < ROOM:
            self._lines.put(line)
        else:
            self.dropped += 1

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until what was said is written, so long at most."""
        written = threading.Event()
        if self._thread is not None:
            self._lines.put(written)
            written.wait(seconds)

    def _run(self) -> None:
        while True:
            entries = [self._lines.get()]
            time.sleep(GATHER_SECONDS)
            while not self._lines.empty():
                entries.append(self._lines.get())
            lines = [e if isinstance(e, str) else _encode(e) for e in entries if not isinstance(e, threading.Event)]
            try:
                stream = self._stream or sys.stdout
                stream.write("".join(f"{line}\n" for line in lines))
                stream.flush()
            except (OSError, ValueError, MemoryError):  # a full disk, a closed pipe
                self.dropped += len(lines)
            for entry in entries:
                if isinstance(entry, threading.Event):
                    entry.set()


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

"""One thread that writes to many sockets, so that a step of the loop wakes one thread and not one for each reader.

The handler of a stream sends its beginning and its end. Between them it lends its socket to this thread and sleeps.
Whatever would make this thread wait or fail (a slow reader, a client that has disconnected, an answer that failed) gives
the socket back, and its handler continues alone. This module must not know what is written.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from serving.wakeup import Wakeup

INTERVAL = 0.020  # seconds for which tokens may be put together
SHARE = 0.02  # of the time, for writing
CYCLE_SECONDS = 0.04  # in which each viewer has a turn, if there are few
TURN_SECONDS = 0.0125  # between two turns, at least, however many viewers there are
BEHIND_SECONDS = 0.001  # between two turns after a viewer that has more to read
IDLE_SECONDS = 3600.0


class Source(Protocol):
    """The content of a stream."""

    @property
    def unread(self) -> int:
        """The number of tokens or entries that `read` has not returned, as far as known."""

    def read(self) -> bytes:
        """Return the bytes that are ready to be sent."""


class LentSocket:
    """A socket that its handler lends to the writer while it sleeps; `wakeup` wakes the handler.

    The writer serves a `paced` one in turn with the others of its kind, and any other one after each step.
    """

    def __init__(
        self, writer: SocketWriter, sock: socket.socket, wakeup: Wakeup, source: Source, paced: bool = False,
        is_chunked: bool = True,
    ) -> None:  # fmt: skip
        self.source = source
        self.paced = paced
        self._is_chunked = is_chunked
        self._writer = writer
        self._sock = sock
        self._wakeup = wakeup
        self._lock = threading.Lock()  # held while the writer writes
        self._lent = False
        self._sent_at = 0.0
        self._rest = b""  # what the socket did not take
        self._error: Exception | None = None  # what reading raised

    def lend(self, seconds: float) -> float:
        """Let the writer write for `seconds`, or until the wakeup is notified; return when it last wrote.

        Call `finish` afterwards.
        """
        self._lent = True
        self._writer.take(self)
        if self.source.unread:  # it came too late for the handler, and maybe too early for the writer
            self._writer.look()
        self._wakeup.wait(seconds)
        self._writer.give_back(self)
        with self._lock:
            self._lent = False
        return self._sent_at

    def finish(self) -> None:
        """Send what the socket did not take at once, however long that takes, and raise what the source raised."""
        rest, self._rest = self._rest, b""
        if rest:
            self._sock.sendall(rest)
        if self._error is not None:
            raise self._error

    def write(self, now: float) -> None:
        """Send what is ready if the socket takes it at once; otherwise wake the handler."""
        with self._lock:
            if not self._lent:
                return
            try:
                data = self.source.read()
            except Exception as error:
                self._error = error
            else:
                if not data:
                    return
                self._sent_at = now
                self._rest = self._send(b"%X\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
            if self._rest or self._error is not None:
                self._lent = False
                self._wakeup.notify()

    def _send(self, chunk: bytes) -> bytes:
        """Return the part of a chunk that the socket did not take; all of it if the client has disconnected."""
        try:
            return chunk[self._sock.send(chunk, socket.MSG_DONTWAIT) :]
        except OSError:
            return chunk


class SocketWriter:
    """Writes to streams after each step, and to viewers of the live page in turn.

    If a pass over all streams takes more than `share` of a step's time, streams are written every `interval` seconds
    instead. Viewers have at most 80 turns a second together, so that their cost does not grow with their number.
    """

    def __init__(
        self, interval: float = INTERVAL, share: float = SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.interval = interval
        self.share = share
        self._clock = clock
        self._wakeup = Wakeup()
        self._streams: set[LentSocket] = set()
        self._viewers: deque[LentSocket] = deque()
        self._turn_at = 0.0  # time of the next viewer's turn
        self._lock = threading.Lock()
        self._steps = 0
        self._thread: threading.Thread | None = None

    def take(self, lent: LentSocket) -> None:
        """Write to a socket from now on; the thread starts with the first."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="socket-writer", daemon=True)
                self._thread.start()
            if lent.paced:
                self._viewers.append(lent)
            else:
                self._streams.add(lent)
            is_alone = len(self._viewers if lent.paced else self._streams) == 1
        if is_alone:
            self._wakeup.notify()

    def look(self) -> None:
        """Check all streams now, unless that will be done soon."""
        self._wakeup.notify_tokens()

    def give_back(self, lent: LentSocket) -> None:
        """Write to a socket no longer."""
        with self._lock:
            if lent.paced:
                self._viewers.remove(lent)
            else:
                self._streams.discard(lent)

    def observe(self, iteration: Any, left: list[Any]) -> None:
        """Note that there may be new tokens; called in the loop's thread."""
        if iteration is not None:
            self._steps += 1
            if self._wakeup.wants_tokens:
                self._wakeup.notify_tokens()

    def _run(self) -> None:
        began, steps, step_seconds, cost = self._clock(), self._steps, self.interval, 0.0
        while True:
            is_costly = cost > self.share * step_seconds and step_seconds < self.interval
            self._wait(steps, began + self.interval if is_costly else None)
            now, last = self._clock(), steps
            steps = self._steps
            if steps > last:
                step_seconds = (now - began) / (steps - last)
            began, worked = now, time.thread_time()
            with self._lock:
                streams = list(self._streams)
            for stream in streams:
                stream.write(now)
            cost = time.thread_time() - worked

    def _wait(self, steps: int, until: float | None) -> None:
        """Give viewers their turns until the streams are due.

        That is when there have been more than `steps` steps, or at the time `until`, if given.
        """
        wakeup = self._wakeup
        while True:
            wakeup.wants_tokens = False
            now = self._clock()
            if self._viewers and now >= self._turn_at:
                self._write_viewer(now)
            if until is not None and now >= until:
                return
            # Set the flag before reading the count: a step that ends in between notifies.
            wakeup.wants_tokens = until is None and bool(self._streams)
            if wakeup.wants_tokens and self._steps != steps:
                return
            end = now + IDLE_SECONDS if until is None else until
            if self._viewers:
                end = min(end, self._turn_at)
            if wakeup.wait(end - self._clock()):
                return

    def _write_viewer(self, now: float) -> None:
        """Write to the viewer whose turn it is."""
        with self._lock:
            if not self._viewers:
                return
            viewer = self._viewers[0]
            self._viewers.rotate(-1)
            pause = max(CYCLE_SECONDS / len(self._viewers), TURN_SECONDS)
        viewer.write(now)
        self._turn_at = now + (min(pause, BEHIND_SECONDS) if viewer.source.unread else pause)

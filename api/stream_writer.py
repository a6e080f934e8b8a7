"""One thread that writes for all streams, straight to their sockets, so that a step wakes one thread and not one each.

A stream belongs to its handler, who sends its beginning and its end and, between them, lends it and sleeps. Whatever
would make this thread wait or fail (a reader who is too slow, a client who has gone, an answer that broke) gives the
stream back, and its handler goes on alone. It must not know what a dialect's events look like.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from serving.inference import Wakeup

INTERVAL = 0.020  # seconds for which tokens may be put together
SHARE = 0.02  # of the time, for writing
IDLE_SECONDS = 3600.0


class Source(Protocol):
    """What a stream says."""

    @property
    def unread(self) -> int:
        """How many tokens there are that `read` has not seen."""

    def read(self) -> bytes:
        """Return the bytes to send that there are by now."""


class LentSocket:
    """A stream that its handler, which `wakeup` wakes, lends while it sleeps."""

    def __init__(self, writer: StreamWriter, sock: socket.socket, wakeup: Wakeup, source: Source) -> None:
        self._writer = writer
        self._sock = sock
        self._wakeup = wakeup
        self._source = source
        self._lock = threading.Lock()  # held while the writer writes
        self._lent = False
        self._sent_at = 0.0
        self._rest = b""  # what the socket did not take
        self._error: Exception | None = None  # what reading raised

    def sleep(self, seconds: float) -> float:
        """Let the writer write until the wakeup is notified, or for so many seconds; return when it last did.

        What the socket did not take at once is sent here, where it may wait; what went wrong is raised here.
        """
        self._lent = True
        self._writer.take(self)
        if self._source.unread:  # it came too late for the handler, and maybe too early for the writer
            self._writer.look()
        self._wakeup.wait(seconds)
        self._writer.give_back(self)
        with self._lock:
            self._lent = False
        rest, self._rest = self._rest, b""
        if rest:
            self._sock.sendall(rest)
        if self._error is not None:
            raise self._error
        return self._sent_at

    def write(self, now: float) -> None:
        """Send what there is, if the socket takes it at once; else wake the handler for it."""
        with self._lock:
            if not self._lent:
                return
            try:
                data = self._source.read()
            except Exception as error:
                self._error = error
            else:
                if not data:
                    return
                self._sent_at = now
                self._rest = self._send(b"%X\r\n%b\r\n" % (len(data), data))
            if self._rest or self._error is not None:
                self._lent = False
                self._wakeup.notify()

    def _send(self, chunk: bytes) -> bytes:
        """Return what of a chunk the socket did not take; all of it if the client has gone."""
        try:
            return chunk[self._sock.send(chunk, socket.MSG_DONTWAIT) :]
        except OSError:
            return chunk


class StreamWriter:
    """Writes for who lends, after each step; for `interval` seconds together where that would be too dear.

    Too dear is a pass over all streams that takes more than `share` of a step's time.
    """

    def __init__(
        self, interval: float = INTERVAL, share: float = SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.interval = interval
        self.share = share
        self._clock = clock
        self._wakeup = Wakeup()
        self._lent: set[LentSocket] = set()
        self._lock = threading.Lock()
        self._steps = 0
        self._thread: threading.Thread | None = None

    def take(self, loan: LentSocket) -> None:
        """Write for a stream from now on; the thread starts with the first."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream-writer", daemon=True)
                self._thread.start()
            self._lent.add(loan)
            is_alone = len(self._lent) == 1
        if is_alone:
            self._wakeup.notify()

    def look(self) -> None:
        """Look at all streams now, unless that will be done soon."""
        self._wakeup.notify_tokens()

    def give_back(self, loan: LentSocket) -> None:
        with self._lock:
            self._lent.discard(loan)

    def observe(self, iteration: Any, left: list[Any]) -> None:
        """Note that there may be tokens; called in the loop's thread."""
        if iteration is not None:
            self._steps += 1
            self._wakeup.notify_tokens()

    def _run(self) -> None:
        began, steps, step_seconds, cost = self._clock(), self._steps, self.interval, 0.0
        while True:
            dear = cost > self.share * step_seconds and step_seconds < self.interval
            self._wait(steps, began + self.interval if dear else None)
            now, last = self._clock(), steps
            steps = self._steps
            if steps > last:
                step_seconds = (now - began) / (steps - last)
            began, worked = now, time.thread_time()
            with self._lock:
                lent = list(self._lent)
            for loan in lent:
                loan.write(now)
            cost = time.thread_time() - worked

    def _wait(self, steps: int, until: float | None) -> None:
        """Sleep until a step has ended after so many `steps`, or till the given time without listening to the loop."""
        wakeup = self._wakeup
        wakeup.wants_tokens = False
        if not self._lent:
            wakeup.wait(IDLE_SECONDS)
        elif until is not None:
            wakeup.wait(until - self._clock())
        else:
            wakeup.wants_tokens = True
            if self._steps == steps:
                wakeup.wait(IDLE_SECONDS)

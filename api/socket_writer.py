"""One thread that writes all streams, so that none holds a thread, and a step of the loop wakes one and not one for each.

A handler hands over a stream: its source, its socket, and what to do at its beginning and its end. What would make this
thread wait (a client that reads too slowly) is done in another thread, and the stream comes back afterwards. This module
must not know what is written.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from serving.inference import CHECK_SECONDS
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)

STREAM = "effective_batching.stream"  # in the WSGI environment of a response that is a stream: its source
INTERVAL = 0.020  # seconds for which tokens may be put together
SHARE = 0.02  # of the time, for writing
CYCLE_SECONDS = 0.04  # in which each viewer has a turn, if there are few
TURN_SECONDS = 0.0125  # between two turns, at least, however many viewers there are
BEHIND_SECONDS = 0.001  # between two turns after a viewer that has more to read
IDLE_SECONDS = 3600.0
LAST_CHUNK = b"0\r\n\r\n"


class Source(Protocol):
    """The content of a stream.

    The writer reads it when its `wakeup` is notified, at `ends_at`, and at least every `CHECK_SECONDS`; once it has begun,
    after each step as well. Those that are `paced` are read in turn instead.
    """

    ended: bool  # `read` has returned the last bytes
    is_behind: bool  # `read` has more to return at once
    blocked_since: float | None  # set while the client does not read

    @property
    def paced(self) -> bool: ...
    @property
    def wakeup(self) -> Wakeup | None: ...
    @property
    def ends_at(self) -> float: ...

    def read(self) -> bytes:
        """Return the bytes that are ready to be sent, and never wait."""


class Stream:
    """A response that the writer sends.

    `begin` returns its head when its first bytes are ready, or None if they must not be sent: then the caller keeps the
    connection. `end` is called once, with whether all was sent. `in_thread` calls a function in a thread that may block.
    """

    def __init__(
        self, source: Source, sock: socket.socket, is_chunked: bool, begin: Callable[[], bytes | None],
        end: Callable[[bool], None], in_thread: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self.source = source
        self.is_ready = True  # the writer may use it: it has not ended, and no thread sends the rest of a chunk
        self._sock = sock
        self._is_chunked = is_chunked
        self._begin: Callable[[], bytes | None] | None = begin
        self._end = end
        self._in_thread = in_thread

    @property
    def has_begun(self) -> bool:
        """Whether there have been bytes to send."""
        return self._begin is None

    def write(self, resume: Callable[[], None]) -> None:
        """Send what is ready. What the socket does not take at once is sent in another thread, which calls `resume`."""
        try:
            data = self._next()
            if data is None:
                return
            try:
                rest = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                rest = data
        except Exception as error:
            if not isinstance(error, OSError):  # which means that the client has disconnected
                log.exception("a stream failed")
            self.close(False)
            return
        if rest:
            self.is_ready, self.source.blocked_since = False, time.perf_counter()
            self._in_thread(partial(self._send_rest, rest, resume))
        elif self.source.ended:
            self.close(True)

    def _next(self) -> bytes | None:
        """Return the next bytes for the socket, None if there are none yet; without chunks, the last may be none."""
        source = self.source
        frames = [source.read()]
        while source.is_behind and not source.paced:
            frames.append(source.read())
        if self._is_chunked:
            frames = [b"%X\r\n%b\r\n" % (len(frame), frame) for frame in frames if frame]
            frames += [LAST_CHUNK] if source.ended else []
        data = b"".join(frames)
        if not (data or source.ended):
            return None
        if self._begin is not None:
            head, self._begin = self._begin(), None
            if head is None:
                self.is_ready = False
                return None
            data = head + data
        return data

    def _send_rest(self, rest: bytes, resume: Callable[[], None]) -> None:
        try:
            self._sock.sendall(rest)
        except OSError:  # the client has disconnected, or read nothing for too long
            self.close(False)
            return
        self.source.blocked_since = None
        if self.source.ended:
            self.close(True)
        else:
            self.is_ready = True
            resume()

    def close(self, is_whole: bool) -> None:
        """End it; the writer uses it no longer."""
        self.is_ready = False
        if self.source.wakeup is not None:
            self.source.wakeup.resume = None  # a cycle, which would live until the next GC
        try:
            self._end(is_whole)
        except Exception:
            log.exception("cannot end a stream")


class SocketWriter:
    """Writes to streams after each step, and to viewers of the live page in turn.

    If a pass over all streams takes more than `share` of a step's time, streams are written every `interval` seconds
    instead, except their first tokens and their ends, which notify their wakeup. Viewers have at most 80 turns a second
    together, so that their cost does not grow with their number.
    """

    def __init__(
        self, interval: float = INTERVAL, share: float = SHARE, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.interval = interval
        self.share = share
        self._clock = clock
        self._wakeup = Wakeup()
        self._woken: deque[Stream] = deque()
        # Only the thread uses these.
        self._streams: dict[Stream, None] = {}
        self._impatient: dict[Stream, None] = {}  # those of `_streams` that end before the server's limit
        self._viewers: deque[Stream] = deque()
        self._turn_at = 0.0  # time of the next viewer's turn
        self._lock = threading.Lock()
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="socket-writer", daemon=True)

    @property
    def open(self) -> int:
        """The number of streams, without those that wait for their clients."""
        return len(self._streams)

    def start(self) -> None:
        """Start the thread, once. A server does so before its first request, while a thread is still available."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def take(self, stream: Stream) -> None:
        """Write a stream to its end."""
        self.start()
        if stream.source.wakeup is not None:
            stream.source.wakeup.resume = partial(self._wake, stream)
        self._wake(stream)

    def _wake(self, stream: Stream) -> None:
        """Look at a stream soon; called in any thread."""
        self._woken.append(stream)
        self._wakeup.notify()

    def observe(self, iteration: Any, left: list[Any]) -> None:
        """Note that there may be new tokens; called in the loop's thread."""
        if iteration is not None:
            self._steps += 1
            if self._wakeup.wants_tokens:
                self._wakeup.notify_tokens()

    def _run(self) -> None:
        began, steps, step_seconds, cost = self._clock(), self._steps, self.interval, 0.0
        check_at = began
        while True:
            is_costly = cost > self.share * step_seconds and step_seconds < self.interval
            self._wait(None if is_costly else steps, began + (self.interval if is_costly else CHECK_SECONDS))
            now, last = self._clock(), steps
            steps = self._steps
            if steps > last:
                step_seconds = (now - began) / (steps - last)
            began, worked = now, time.thread_time()
            is_check = now >= check_at
            check_at = now + CHECK_SECONDS if is_check else check_at
            for stream in [stream for stream in self._streams if is_check or stream.has_begun]:
                self._write(stream)
            cost = time.thread_time() - worked

    def _wait(self, steps: int | None, until: float) -> None:
        """Give viewers their turns, and write what was woken, until the streams are due.

        That is at the time `until`, and before it when there have been more than `steps` steps, if given.
        """
        wakeup = self._wakeup
        while True:
            wakeup.wants_tokens = False
            now = self._clock()
            while self._woken:
                self._write(self._woken.popleft())
            for stream in [stream for stream in self._impatient if stream.source.ends_at <= now]:
                self._write(stream)
            if self._viewers and now >= self._turn_at:
                self._write_viewer(now)
            if self._streams and now >= until:
                return
            # Set the flag before reading the count: a step that ends in between notifies.
            wakeup.wants_tokens = steps is not None and bool(self._streams)
            if wakeup.wants_tokens and self._steps != steps:
                return
            ends = [until if self._streams else now + IDLE_SECONDS, *(s.source.ends_at for s in self._impatient)]
            if self._viewers:
                ends.append(self._turn_at)
            wakeup.wait(min(ends) - self._clock())

    def _write(self, stream: Stream) -> None:
        """Write a stream, and keep it unless it has ended or waits for its client."""
        if stream.is_ready:  # or it was woken for the last time
            stream.write(partial(self._wake, stream))
        if stream.source.paced:
            if stream.is_ready:
                self._viewers.append(stream)
        elif stream.is_ready:
            self._streams[stream] = None
            if stream.source.ends_at < math.inf:
                self._impatient[stream] = None
        else:
            self._streams.pop(stream, None)
            self._impatient.pop(stream, None)

    def _write_viewer(self, now: float) -> None:
        """Write to the viewer whose turn it is."""
        pause = max(CYCLE_SECONDS / len(self._viewers), TURN_SECONDS)
        viewer = self._viewers.popleft()
        self._write(viewer)
        self._turn_at = now + (min(pause, BEHIND_SECONDS) if viewer.source.is_behind else pause)

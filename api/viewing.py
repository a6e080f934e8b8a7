"""How viewers read the feed: each from its own place in the ring, and one thread writing for all of them.

A thread for each viewer would wake as often as it looks, and take the interpreter from the loop each time, many at
once. The one that writes looks for one viewer after the other, at even distances, and no more often for many than for
a few, so that what they cost is bounded. A client that does not read is left alone until its socket takes bytes again.
It must not know what an entry says.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

from observe.feed import Feed, Viewer, event

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.04  # how often a viewer is looked after: the loop wakes nobody
TURN_SECONDS = 0.0125  # between two of them, at least: many viewers are looked after less often
BEHIND_SECONDS = 0.001  # until the next is looked after, when one has more to read
PING_SECONDS = 10.0
WAKE_SECONDS = 1.0  # how often a handler looks whether its viewer is still there
TOGETHER = 64  # entries of one send
PING = b": ping\n\n"


class Reader:
    """A viewer's place in the feed: after step `after`, which it had last, else at the `last` steps.

    Without `detail` it reads steps and gaps alone.
    """

    def __init__(self, feed: Feed, after: int | None = None, last: int = 0, *, detail: bool = False) -> None:
        self.feed = feed
        self.detail = detail
        self.is_behind = False  # there was more than one send takes
        self._wanted, self._known, self._missed = self._begin(after, last)
        self._read_at = feed.clock()

    def _begin(self, after: int | None, last: int) -> tuple[int, int | None, bool]:
        """Return the number to read from, the last step that the viewer knows of, and whether it may miss some.

        One that knows a step that has not been yet has it from another run of the server, and knows nothing of this.
        """
        entries = self.feed.entries()
        oldest = entries[0].number if entries else 0
        end = entries[-1].number + 1 if entries else 0
        if after is not None and after <= self.feed.steps:
            begin = next((e.number for e in entries if e.n > after), end)
            return begin, after, begin == oldest > 0
        if after is not None:
            return oldest, None, False
        if not last:
            return end, None, False
        steps = [entry.number for entry in entries if entry.kind == "step"]
        return (steps[-last] if len(steps) >= last else oldest), None, False

    def read(self) -> bytes:
        """Return the events that are new, a comment when there have been none for long, or nothing."""
        frames: list[bytes] = []
        count = 0
        for entry in self.feed.since(self._wanted, TOGETHER):
            count += 1
            self._missed = self._missed or entry.number > self._wanted
            self._wanted = entry.number + 1
            if entry.kind == "step":
                known = self._known
                if self._missed and known is not None and entry.n > known + 1:
                    frames.append(event("gap", {"from": known + 1, "to": entry.n - 1}))
                self._known, self._missed = entry.n, False
            if self.detail or entry.kind == "step":
                frames.append(entry.frame)
        self.is_behind = count == TOGETHER
        now = self.feed.clock()
        if not frames and now - self._read_at < PING_SECONDS:
            return b""
        self._read_at = now
        return b"".join(frames) or PING


def follow(viewer: Viewer, reader: Reader) -> Iterator[bytes]:
    """Yield what there is to read until the viewer has gone, for streams that only their handler can write."""
    feed = reader.feed
    while not (viewer.gone or feed.closed):
        data = reader.read()
        if not data:
            time.sleep(LOOK_SECONDS)
            continue
        viewer.begun = feed.clock()
        yield data
        viewer.begun = None


class View:
    """A viewer whose socket is lent to the writer; `is_over` when the writer has given it back."""

    def __init__(self, viewer: Viewer, reader: Reader, sock: socket.socket) -> None:
        self.viewer = viewer
        self.reader = reader
        self.is_over = threading.Event()
        self._sock = sock
        self._rest = b""  # what the socket did not take

    def turn(self, patience: float) -> None:
        """Write what there is, as much as the socket takes at once; hang up when it took nothing for too long."""
        viewer, feed = self.viewer, self.reader.feed
        if viewer.gone or feed.closed:
            self.is_over.set()
            return
        if not self._rest:
            data = self.reader.read()
            if not data:
                return
            viewer.begun = feed.clock()
            self._rest = b"%X\r\n%b\r\n" % (len(data), data)
        try:
            self._rest = self._rest[self._sock.send(self._rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            if viewer.begun is not None and feed.clock() - viewer.begun > patience:
                viewer.hang_up()
                self.is_over.set()
            return
        except OSError:  # it has gone
            self.is_over.set()
            return
        viewer.begun = feed.clock() if self._rest else None


class ViewWriter:
    """Writes to the sockets of viewers, one after the other; its thread starts with the first."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._views: list[View] = []
        self._lock = threading.Lock()
        self._came = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, view: View) -> None:
        """Write for a viewer until it has gone or the feed is closed; its handler's thread waits here meanwhile."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="view-writer", daemon=True)
                self._thread.start()
            self._views.append(view)
        self._came.set()
        try:
            while not view.is_over.wait(WAKE_SECONDS):
                pass
        finally:
            with self._lock:
                self._views.remove(view)

    def _run(self) -> None:
        while True:
            self._came.clear()
            with self._lock:
                views = [view for view in self._views if not view.is_over.is_set()]
            if not views:
                self._came.wait()
                continue
            for view in views:
                self._take_turn(view)
                pause = max(LOOK_SECONDS / len(views), TURN_SECONDS)
                time.sleep(min(pause, BEHIND_SECONDS) if view.reader.is_behind else pause)

    def _take_turn(self, view: View) -> None:
        try:
            view.turn(self._patience)
        except Exception:
            log.exception("cannot send events to a viewer")
            view.is_over.set()
            view.viewer.hang_up()

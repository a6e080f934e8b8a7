"""How a viewer reads the feed: from its own position in the ring buffer, as frames of server-sent events.

This module must not know what an entry means.
"""

from __future__ import annotations

import math

from observe.feed import Feed, Viewer, event

PING_SECONDS = 10.0
BATCH = 64  # entries of one send
PING = b": ping\n\n"


class FeedReader:
    """A viewer's position in the feed: after step `after`, its last one, otherwise at the `last` steps.

    Without `detail` it reads only steps and gaps. With `compact`, a step that follows another in the same connection and
    repeats it has no members. The `greeting` comes first.
    """

    paced, wakeup, ends_at = True, None, math.inf

    def __init__(
        self,
        feed: Feed,
        viewer: Viewer,
        after: int | None = None,
        last: int = 0,
        *,
        detail: bool = False,
        compact: bool = False,
    ) -> None:
        self._feed = feed
        self._viewer = viewer
        self._detail = detail
        self._compact = compact
        self._sent: int | None = None  # the last step of this connection
        self.greeting = b""
        self.ended = self.is_behind = False
        self._wanted, self._known, self._missed = self._begin(after, last)
        self._read_at = feed.clock()

    def _begin(self, after: int | None, last: int) -> tuple[int, int | None, bool]:
        """Return the number to read from, the last step that the viewer has, and whether it may have missed some.

        A viewer that has a step from the future has it from another run of the server, and none of this run.
        """
        entries = self._feed.entries()
        oldest = entries[0].number if entries else 0
        end = entries[-1].number + 1 if entries else 0
        if after is not None and after <= self._feed.steps:
            begin = next((e.number for e in entries if e.n > after), end)
            return begin, after, begin == oldest > 0
        if after is not None:
            return oldest, None, False
        if not last:
            return end, None, False
        steps = [entry.number for entry in entries if entry.kind == "step"]
        return (steps[-last] if len(steps) >= last else oldest), None, False

    def read(self) -> bytes:
        """Return the new events, a comment after a long silence, or nothing; it has ended with its viewer and with the feed."""
        if self._viewer.gone or self._feed.closed:
            self.ended = True
            return b""
        if self.greeting:
            greeting, self.greeting, self.is_behind = self.greeting, b"", True
            return greeting
        frames: list[bytes] = []
        count = 0
        for entry in self._feed.since(self._wanted, BATCH):
            count += 1
            self._missed = self._missed or entry.number > self._wanted
            self._wanted = entry.number + 1
            if entry.kind == "step":
                known = self._known
                if self._missed and known is not None and entry.n > known + 1:
                    frames.append(event("gap", {"from": known + 1, "to": entry.n - 1}))
                self._known, self._missed = entry.n, False
                frames.append(entry.brief if self._compact and self._sent == entry.n - 1 else entry.frame)
                self._sent = entry.n
            elif self._detail:
                frames.append(entry.frame)
        self.is_behind = count == BATCH
        now = self._feed.clock()
        if not frames and now - self._read_at < PING_SECONDS:
            return b""
        self._read_at = now
        return b"".join(frames) or PING

    @property
    def blocked_since(self) -> float | None:
        """When the send that has not ended began."""
        return self._viewer.sending_since

    @blocked_since.setter
    def blocked_since(self, began: float | None) -> None:
        self._viewer.sending_since = began

"""One request while its answer arrives, and the outcome that it ends with. No sockets or clocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp

from ..data import Planned
from ..report.measure import Outcome
from .dialects import Answer, Dialect, Refused, Unreadable
from .target import CANNOT_CONNECT

DETAIL_CHARACTERS = 200


@dataclass(slots=True)
class Reading:
    """One request while its answer arrives.

    A chat message requests no length: its outcome has the length that the model chose.
    """

    planned: Planned
    dialect: Dialect
    intended: float
    sent: float
    answer: Answer = field(default_factory=Answer)
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    def read(self, events: Iterable[bytes], now: float) -> None:
        """Add events that arrived at a time; raise as `Dialect.feed` does."""
        for data in events:
            count = self.dialect.feed(data, self.answer)
            if count is None:
                continue
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last = now
            self.chunks.append(count)

    def missing(self) -> tuple[str, str]:
        """Return the kind of failure of a stream that is over, and its detail; "" if it was complete."""
        a = self.answer
        if not a.ended:
            return "stream cut", "the stream ended without its final event"
        if not self.chunks and a.tokens is None and not a.finish_reason:
            return "unreadable answer", "the stream had neither text nor usage"
        return "", ""

    def outcome(self, now: float, error: str = "", detail: str = "") -> Outcome:
        """Return the outcome of the request."""
        a, chat, failed = self.answer, self.planned.chat, bool(error)
        tokens = a.tokens or len(self.chunks)  # a server that streams without usage sends a chunk per token
        asked = tokens if chat and not failed else self.planned.num_tokens
        return Outcome(
            self.planned.index, asked, self.intended, self.sent, now,
            tokens=0 if failed else tokens, error=error, detail=detail[:DETAIL_CHARACTERS],
            completion="" if failed else a.text, first=self.first, gaps=tuple(self.gaps),
            chunks=tuple(self.chunks), prompt_tokens=a.prompt_tokens,
            cached_tokens=a.cached_tokens, queue=a.queue, batch_mean=a.batch_mean,
            batch_max=a.batch_max, id=a.id, user=self.planned.user, finish_reason=a.finish_reason,
            turn=chat.turn if chat else None, program=self.planned.program,
            max_tokens=None if chat and not chat.capped else self.planned.num_tokens,
        )  # fmt: skip


def failure(error: BaseException) -> tuple[str, str]:
    """Return the kind of failure that an exception means for a request, and its detail."""
    if isinstance(error, Refused):
        return f"error event ({error.kind or 'no type'})", str(error)
    if isinstance(error, Unreadable):
        return "unreadable answer", str(error)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return CANNOT_CONNECT, "timed out while connecting"
    if isinstance(error, TimeoutError):
        return "timeout", "timed out; raise --timeout to wait longer"
    if isinstance(error, aiohttp.ClientConnectorError):
        return CANNOT_CONNECT, "no connection to the server"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return ("connection broken", "the server closed the connection before the answer was complete")
    return "unreadable answer", f"{type(error).__name__}: {error}"

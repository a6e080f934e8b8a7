"""A log of requests of any server, as the fit needs it: one form, whatever file it came from, with what is wrong with it.

A log says when each request arrived, how long its prompt and its answer are, and when its first and its last token came. It
does not say when steps were, nor who was in them. This module must not know the format of any file, nor judge what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from client.places import NAN
from simulate.trace import Seen, Trace

PAGE = 16  # tokens, where the log does not say


class Request(NamedTuple):
    """One request as a file has it, in seconds of the file's clocks; NaN and 0: the file does not say.

    `sent` is when the client sent it or the server received it. `queued` is given where `sent` is of another clock than `first`
    and `last`: when the server's scheduler saw it, on their clock. `chunks` are the times of all chunks of the answer, `counts`
    the tokens of each, if not 1. `cached` are prompt tokens that the server found in its prefix cache. `prefix` is the id of a
    request before it and with how many tokens of that both begin. `error`: why there is no whole answer.
    """

    sent: float
    prompt: int
    output: int
    first: float = NAN
    last: float = NAN
    id: str = ""
    queued: float = NAN
    chunks: Sequence[float] = ()
    counts: Sequence[int] = ()
    limit: int = 0  # max_tokens
    client: str = ""
    priority: int = 0
    cached: int = 0
    prefix: Sequence[Any] = ()
    error: str = ""


class Note(NamedTuple):
    """What is wrong with a log, as a sentence, and how many times as wide it makes the intervals."""

    text: str
    widening: float = 1.0


@dataclass(frozen=True)
class Log:
    """Requests in order of arrival, whose times are seconds since the first arrival.

    `first` and `last` are arrays of when the first and last tokens came, NaN where unknown. `chunks` has the times of the chunks
    of each answer and the tokens of each, empty where unknown. The names in `server` are `engine` (vllm, ...), `version`, `model`,
    `hardware`, those of `simulate.scenario.EngineSize`, and `policy` and `policy_options` of our own server.
    """

    trace: Trace
    first: np.ndarray
    last: np.ndarray
    chunks: Sequence[tuple[np.ndarray, np.ndarray]] = ()
    server: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @classmethod
    def of(cls, requests: Sequence[Request], server: Mapping[str, Any], notes: Sequence[Note]) -> Log:
        """Return the log of requests in order of arrival, on one clock."""
        zero, size = requests[0].sent, server.get("page_size")
        pages, lost = _pages(requests, size if type(size) is int and size > 0 else PAGE)
        text = f"Requests with cached tokens that none in the log had before: {lost}. They count as computed."
        seen = [
            Seen(
                r.sent - zero, r.prompt, r.output, None if np.isnan(r.last) else r.last - r.sent,
                r.client, r.priority, limit=r.limit, pages=numbers,
            )
            for r, numbers in zip(requests, pages)
        ]  # fmt: skip
        first, last = (np.array(times) - zero for times in zip(*((r.first, r.last) for r in requests)))
        chunks = [(np.array(r.chunks) - zero, np.array(r.counts, int)) for r in requests]
        return cls(Trace(seen), first, last, chunks, server, (*notes, *[Note(text, 1.2)] * (lost > 0)))

    def until(self, count: int) -> Log:
        """Return the log with the same requests, but the times of the first `count` alone, in order of arrival."""
        kept = np.arange(len(self.first)) < count
        first, last = (np.where(kept, times, NAN) for times in (self.first, self.last))
        seen = [*self.trace.seen[:count], *(one._replace(latency=None) for one in self.trace.seen[count:])]
        nothing = (np.empty(0), np.empty(0, int))
        chunks = [*self.chunks[:count], *[nothing] * len(self.chunks[count:])]
        return replace(self, trace=Trace(seen), first=first, last=last, chunks=chunks)

    @property
    def longest(self) -> int:
        """The most tokens of a request, of prompt and answer together."""
        return int((self.prompt + self.output).max())

    @property
    def widening(self) -> float:
        """How many times as wide the intervals must be, by all notes together."""
        return float(np.prod([note.widening for note in self.notes]))

    @property
    def at(self) -> np.ndarray:
        """When the requests arrived."""
        return np.array([seen.at for seen in self.trace.seen])

    @property
    def prompt(self) -> np.ndarray:
        return np.array([seen.prompt for seen in self.trace.seen])

    @property
    def output(self) -> np.ndarray:
        return np.array([seen.tokens for seen in self.trace.seen])


def _pages(requests: Sequence[Request], size: int) -> tuple[list[Sequence[int]], int]:
    """Return the full pages of each request by numbers, and how many requests found pages that none had before them.

    A request has numbers of its own, so that it finds its pages again when it was preempted, but for those of its prefix, or
    as many as it found in the prefix cache: they are those of the last request of its client that is as long.
    """
    fresh, pages, lost = count(), list[Sequence[int]](), 0
    by_id = {r.id: i for i, r in reversed([*enumerate(requests)])}
    for i, r in enumerate(requests):
        found = (r.prefix[1] if r.prefix else r.cached) // size
        others = [by_id.get(r.prefix[0], i)] if r.prefix else reversed(range(i if found else 0))
        fit = (j for j in others if j < i and len(pages[j]) >= found and (r.prefix or requests[j].client == r.client))
        shared = next((pages[j][:found] for j in fit), ())
        lost += bool(found) and not shared
        pages.append((*shared, *islice(fresh, max(0, (r.prompt + r.output) // size - len(shared)))))
    return pages, lost

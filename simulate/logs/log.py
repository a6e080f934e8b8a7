"""A log of requests of any server, as the fit needs it: one form, whatever file it came from, with what is wrong with it.

A log says when each request arrived, how long its prompt and its answer are, and when its first and its last token came. It
does not say when steps were, nor who was in them. This module must not know the format of any file.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np

from simulate.logs.checks import checked
from simulate.logs.reading import NAN, Note, Reading, Request
from simulate.trace import Seen, Trace

__all__ = ["NAN", "Log", "Note", "Reading", "Request"]

PAGE = 16  # tokens, where the log does not say


@dataclass(frozen=True)
class Log:
    """Requests in order of arrival, whose times are seconds since the first arrival.

    `first` and `last` are arrays of when the first and last tokens came, NaN where unknown. `chunks` has the times of the chunks
    of each answer and the tokens of each, empty where unknown.
    """

    trace: Trace
    first: np.ndarray
    last: np.ndarray
    chunks: Many[tuple[np.ndarray, np.ndarray]] = ()
    server: Mapping[str, Any] = field(default_factory=dict)
    steps: Many[Mapping[str, Any]] = ()
    notes: tuple[Note, ...] = ()
    ids: Many[str] = ()

    @classmethod
    def of(cls, reading: Reading) -> Log:
        """Check what was read; ValueError if no law can be fitted to it. `notes` have what makes it less certain."""
        requests, notes = checked(reading.requests)
        zero = requests[0].sent
        pages, lost = _pages(requests, reading.server.get("page_size") or PAGE)
        if lost:
            text = f"Requests with cached tokens that none in the log had before: {lost}. They count as computed."
            notes.append(Note(text, 1.2))
        seen = [
            Seen(
                r.sent - zero, r.prompt, r.output, None if np.isnan(r.last) else r.last - r.sent,
                r.client, r.priority, limit=r.limit, pages=numbers,
            )
            for r, numbers in zip(requests, pages)
        ]  # fmt: skip
        first, last = (np.array(times) - zero for times in zip(*((r.first, r.last) for r in requests)))
        chunks = [(np.array(r.chunks) - zero, np.array(r.counts, int)) for r in requests]
        ids = [r.id for r in requests]
        return cls(Trace(seen), first, last, chunks, reading.server, reading.steps, (*reading.notes, *notes), ids)

    def only(self, mask: np.ndarray) -> Log:
        """Return the log with the same requests, but the times of those alone that the mask (N, bool) chooses."""
        nothing = (np.empty(0), np.empty(0, int))
        chunks = [some if kept else nothing for some, kept in zip(self.chunks, mask)]
        first, last = (np.where(mask, times, NAN) for times in (self.first, self.last))
        seen = [one if kept else one._replace(latency=None) for one, kept in zip(self.trace.seen, mask)]
        return replace(self, trace=Trace(seen), first=first, last=last, chunks=chunks, steps=())

    def until(self, count: int) -> Log:
        """Return the log with the same requests, but the times of the first `count` alone, in order of arrival."""
        return self.only(np.arange(len(self.first)) < count)

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


def _pages(requests: Many[Request], size: int) -> tuple[list[Many[int]], int]:
    """Return the full pages of each request by numbers, and how many requests found pages that none had before them.

    A request has numbers of its own, so that it finds its pages again when it was preempted, but for those of its prefix, or
    as many as it found in the prefix cache: they are those of the last request as long, of its client if there is one.
    """
    fresh, pages, lost = count(), list[Many[int]](), 0
    by_id = {r.id: i for i, r in reversed([*enumerate(requests)])}
    for i, r in enumerate(requests):
        found = (r.prefix[1] if r.prefix else r.cached) // size
        known = (
            [by_id.get(r.prefix[0], i)] if r.prefix else (j for j in range(i)[::-1] if requests[j].client == r.client)
        )
        others = chain(known, () if r.prefix else range(i)[::-1])
        shared = next((pages[j][:found] for j in others if j < i and len(pages[j]) >= found), ()) if found else ()
        lost += bool(found) and not shared
        pages.append((*shared, *islice(fresh, max(0, (r.prompt + r.output) // size - len(shared)))))
    return pages, lost

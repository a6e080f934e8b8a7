"""Requests that some server has served, which the simulator can serve again: lengths, arrivals, contents, but no text."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from scheduling.sequence import Sequence

if TYPE_CHECKING:
    from simulate.closed_loop import ClosedLoop


class Seen(NamedTuple):
    """A finished request: its arrival, its lengths, and its latency in seconds (None: the answer was incomplete).

    `pages` names its full pages, of prompt and answer, by numbers, equal where their tokens and all before them are.
    `drafts`: of each step with drafts, the place in the answer, their number, and how many were accepted. `waited`: seconds
    until it joined the batch. `constrained`: its answer followed a grammar. `after`: the places of its parents in the trace,
    which were answered before it came.
    """

    at: float
    prompt: int
    tokens: int
    latency: float | None
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    open_ended: bool = False
    limit: int = 0  # max_tokens
    pages: abc.Sequence[int] = ()
    drafts: abc.Sequence[abc.Sequence[int]] = ()
    waited: float = 0.0
    constrained: bool = False
    program: str = ""
    after: abc.Sequence[int] = ()


@dataclass(frozen=True)
class Trace:
    """Finished requests, in order of arrival. If `closed`, those of a program come as long after their parents as they did."""

    seen: abc.Sequence[Seen]
    closed: bool = False

    def sequences(self) -> list[Sequence]:
        """Return fresh sequences, whose answers end after as many tokens as on the server."""
        return self.loop() if self.closed and any(seen.after for seen in self.seen) else self._fresh()

    def _fresh(self) -> list[Sequence]:
        result = [
            Sequence(
                [0] * seen.prompt, max(seen.tokens, seen.limit), id=str(i), arrived_at=seen.at, client=seen.client,
                priority=seen.priority, deadline=seen.deadline, open_ended=seen.open_ended,
                hashes=[page.to_bytes(8, "big") for page in seen.pages], constrained=seen.constrained, program=seen.program,
            )
            for i, seen in enumerate(self.seen)
        ]  # fmt: skip
        for seq, seen in zip(result, self.seen):
            seq.end_after(seen.tokens)
        return result

    def loop(self) -> ClosedLoop:
        """Return fresh sequences of programs, each under `loop_name`."""
        from client.data import Call  # which a run in a browser does not need
        from simulate.closed_loop import ClosedLoop

        ends = [seen.at + (seen.latency or 0.0) for seen in self.seen]
        pauses = [max(0.0, s.at - max((ends[place] for place in s.after), default=s.at)) for s in self.seen]
        calls = [
            Call(tuple(s.after), pause, None, s.prompt, s.tokens, program=self.loop_name(i))
            for i, (s, pause) in enumerate(zip(self.seen, pauses))
        ]
        return ClosedLoop(self._fresh(), calls)

    def loop_name(self, place: int) -> str:
        """Return the name in a loop of the program of a request; one without is a program of its own."""
        name = self.seen[place].program
        return f"program {name}" if name else f"request {place}"

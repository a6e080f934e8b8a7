"""The requests of a simulation as columns of numbers, and what becomes of them: faster, fewer, hinted.

Orders that go by client, priority or deadline need requests that differ in them: `Rows.hinted` draws these. This module
must not know where requests come from, policies, costs, or what becomes of a request.
"""

from __future__ import annotations

import collections.abc as abc
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, cast

import numpy as np

from client import data
from client.data import Call
from client.workloads.arrivals import Arrivals
from scheduling.sequence import Sequence
from simulate.blocks import Blocks
from simulate.closed_loop import ClosedLoop

PACE = 0.02  # assumed seconds per token of the answers of programs in an open loop
STRETCHES = 20  # of a trace's gaps, which another seed puts in another order
PAGE = 16  # tokens; the beginning that prompts must share to be found in a prefix cache


@dataclass(frozen=True)
class Rows:
    """The columns of a run: arrival in seconds, prompt tokens, output tokens, and notes for the user.

    Where requests have them: client, priority (the lower first), seconds from arrival to deadline, and for how long to
    keep their pages; `limit` is the `max_tokens` before which the model's answer may end, None if the client named none, 0 for
    the output itself. `ids` are the prompts' tokens, equal where the texts are; in their place, `blocks` are those of a trace
    that names them. Without either, prompts share no beginnings. `page_size` is that of the pages which the requests will find: where it is that
    of the blocks, these are looked up by number. `texts` and `arrivals` are those of the client's run. With `open_ended`, no
    request names a limit, whatever `limit` says of its length. `constrained`: whether its answer follows a grammar.
    `calls` are those of programs, which
    begin `at` and, if `closed`, send a call when those that it needs are answered.
    """

    at: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    client: list[str] | None = None
    notes: tuple[str, ...] = ()
    priority: list[int] | None = None
    slo: list[float] | None = None
    keep_s: list[float] | None = None
    calls: list[Call] | None = None
    closed: bool = False
    limit: list[int | None] | None = None
    ids: list[list[int]] | None = None
    blocks: Blocks | None = None
    page_size: int = PAGE
    texts: list[str] | None = None
    arrivals: Arrivals | None = None
    open_ended: bool = False
    constrained: list[bool] | None = None

    def sequences(self) -> list[Sequence]:
        """Return a fresh sequence for each row, or the closed loop of all."""
        return ClosedLoop(list(self._fresh()), self.calls or []) if self.closed else list(self._fresh())

    def arriving(self) -> Iterator[Sequence]:
        """Yield a fresh sequence for each row; ValueError for a closed loop."""
        if self.closed:
            raise ValueError("a closed loop needs one engine. Use `run`, or add --open-loop")
        return self._fresh()

    def _fresh(self) -> Iterator[Sequence]:
        """Yield a fresh sequence for each row; prompts without contents are zeros, and equally long ones share a list."""
        rows = zip(
            map(float, self.at),  # one by one, as a list of millions would need more memory than they do
            self._prompts(),
            map(int, self.output),
            self.client or repeat(""),
            self.priority or repeat(0),
            self.slo or repeat(None),
            self.keep_s or repeat(0.0),
            self.limit or repeat(0),
            self.constrained or repeat(False),
            self.calls or repeat(Call((), 0.0, None, 0, 0)),
        )
        for i, (at, prompt, o, client, priority, slo, keep_s, limit, constrained, call) in enumerate(rows):
            seq = Sequence(
                prompt, max(o, limit or 0), id=str(i), arrived_at=at, client=client, priority=priority,
                deadline=None if slo is None else at + slo, session=call.session, keep_s=keep_s,
                open_ended=self.open_ended or limit is None, constrained=constrained, program=call.program,
            )  # fmt: skip
            seq.end_after(o)
            if self.blocks is not None and self.by_number:
                seq.hashes = self.blocks.keys(i, len(prompt))
            yield seq

    def _prompts(self) -> Iterator[list[int]]:
        """Yield the tokens of each prompt."""
        lengths = map(int, self.prompt)
        if self.ids is not None:
            yield from self.ids
        elif self.blocks is None:
            zeros = {p: [0] * p for p in np.unique(self.prompt).tolist()}
            yield from (zeros[p] for p in lengths)
        elif self.by_number:
            # The tokens of no other request, whose number alone matters, without a list that holds them.
            yield from (cast("list[int]", range(i, i + p)) for i, p in enumerate(lengths))
        else:
            yield from (self.blocks.tokens(i, p) for i, p in enumerate(lengths))

    @property
    def by_number(self) -> bool:
        """Whether a page is a block of the trace, so that blocks are looked up by number and nothing is hashed."""
        return self.blocks is not None and self.page_size == self.blocks.size

    @property
    def most(self) -> np.ndarray:
        """The most tokens of each request: its prompt, and its limit or output."""
        limits = np.array([limit or 0 for limit in self.limit or [0] * len(self.at)])
        return np.asarray(self.prompt + np.maximum(self.output, limits))

    @property
    def has_contents(self) -> bool:
        """Whether prompts can share beginnings."""
        return self.ids is not None or self.blocks is not None

    @property
    def rate(self) -> float:
        """Requests or programs per second: the rate asked for, or the trace's own; infinite when all arrive at once."""
        if self.arrivals and math.isfinite(self.arrivals.rate):
            return self.arrivals.rate
        span = float(self.at.max() - self.at.min())
        count = len({call.program for call in self.calls}) if self.calls else len(self.at)
        return (count - 1) / span if span else math.inf

    @property
    def differ_in(self) -> set[str]:
        """The attributes by which an order can tell these requests apart, as `Claims.uses` names them."""
        hints = {"client": self.client, "priority": self.priority, "deadline": self.slo}
        hints["program"] = [call.program for call in self.calls or ()]
        names = {"length"} | {name for name, values in hints.items() if len(set(values or ())) > 1}
        heads = {tuple(ids[:PAGE]) for ids in self.ids or ()}
        shared = len(heads) < len(self.ids or ()) or (self.blocks is not None and self.blocks.are_shared)
        return names | {"prefix"} if shared else names

    @property
    def sha256(self) -> str:
        """The name that the client gives a run: equal exactly when prompts, output lengths, users and times are."""
        prompts = self.texts or map(str, self.prompt.tolist())
        rows = zip(self.at.tolist(), prompts, self.output.tolist(), self.client or repeat(""))
        return data.trace_sha256([data.Planned(i, *row) for i, row in enumerate(rows)])

    def in_open_loop(self) -> Rows:
        """Return the calls of programs at fixed times: when those before them would have ended at the usual pace."""
        at = self.at.tolist()
        for i, call in enumerate(self.calls or ()):
            at[i] = max((at[p] + PACE * float(self.output[p]) for p in call.after), default=at[i]) + call.tool_s
        note = (
            f"in an open loop calls come {PACE:g} s per token of those before them and the pause later, answered or not. This "
            "misleads: most come too early, programs take too little time, and an order gains more than it would"
        )
        return replace(self, at=np.array(at), closed=False).only(np.argsort(at, kind="stable"), note)

    def faster(self, factor: float) -> Rows:
        """Return the same requests at `factor` times the rate."""
        with np.errstate(over="ignore"):
            return replace(self, at=self.at / factor, arrivals=None)

    def at_rate(self, rate: float) -> Rows:
        """Return the same requests at `rate` per second; ValueError if they all arrive at once."""
        if self.rate == math.inf:
            raise ValueError(
                f"requests that all arrive at once have no rate, and {len(self.at):,} can be read. Use a trace of several times"
            )
        return self.faster(rate / self.rate)

    def shuffled(self, seed: int) -> Rows:
        """Return the same requests in the same order with the gaps between them shuffled; those of seed 0 as they are.

        Requests or programs that arrive together still do. Gaps stay with their neighbors, in `STRETCHES` parts cut at a
        random place, so that rate and bursts are kept, but other requests meet them. (Requests drawn again with repetition
        would find each other's prompts in a prefix cache.)
        """
        if not seed:
            return self
        rng = np.random.default_rng(seed)
        starts, which = np.unique(self.at, return_inverse=True)
        gaps = np.roll(np.diff(starts), rng.integers(len(starts)))
        parts = np.array_split(gaps, STRETCHES)
        mixed = [parts[k] for k in rng.permutation(STRETCHES)]
        return replace(self, at=starts[0] + np.concatenate([[0.0], np.cumsum(np.concatenate(mixed))])[which])

    def only(self, chosen: np.ndarray, note: str = "") -> Rows:
        """Return the requests with these indices."""
        columns: dict[str, Any] = {}
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                columns[name] = column[chosen]
            elif isinstance(column, list):
                columns[name] = [column[i] for i in chosen]
        if self.calls:
            place = {int(old): new for new, old in enumerate(chosen)}
            moved = (call._replace(after=tuple(place[p] for p in call.after)) for call in columns["calls"])
            columns["calls"] = list(moved)
        notes = (*self.notes, note) if note else self.notes
        return replace(self, notes=notes, blocks=self.blocks and self.blocks.only(chosen), **columns)

    def first(self, count: int) -> Rows:
        """Return the first requests, or all of the first programs, which come one after another."""
        if self.calls:
            kept = {*islice(dict.fromkeys(call.program for call in self.calls), count)}
            count = sum(call.program in kept for call in self.calls)
        return self.only(np.arange(min(count, len(self.at))))

    def fitting(self, context: int) -> Rows:
        """Return the requests that fit a context, with a note about the others; ValueError if none fits."""
        fits = self.prompt + self.output <= context
        if self.calls:  # a program is left out as a whole
            long = {call.program for call, fit in zip(self.calls, fits) if not fit}
            fits = np.array([call.program not in long for call in self.calls])
        if not fits.any():
            shortest = int((self.prompt + self.output).min())
            raise ValueError(
                f"--context is {context:,}, but the shortest request has {shortest:,} tokens. "
                f"Use --context {shortest} or more"
            )
        left_out = int((~fits).sum())
        longer = "of programs that have one longer" if self.calls else "that are longer"
        note = f"skipped {left_out:,} of {len(fits):,} requests {longer} than --context {context:,}"
        return self.only(np.flatnonzero(fits), note if left_out else "")

    def hinted(self, seed: int, clients: int = 0, priorities: int = 0, slo: abc.Sequence[float] = ()) -> Rows:
        """Return the requests with a client, a priority or a deadline each, drawn from one seed.

        Of `clients` the k-th sends 1/k as often as the first. Priorities are even among 1 .. `priorities`, seconds to
        the deadline among those in `slo`.
        """
        n = len(self.at)
        rngs = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)[2:]]
        rows = self
        if clients:
            share = 1 / np.arange(1, clients + 1)
            drawn = rngs[0].choice(clients, n, p=share / share.sum())
            if self.calls:  # all calls of a program are of one client
                last = {call.program: i for i, call in enumerate(self.calls)}
                drawn = drawn[[last[call.program] for call in self.calls]]
            rows = replace(rows, client=[f"client-{k + 1}" for k in drawn])
        if priorities:
            rows = replace(rows, priority=rngs[1].integers(1, priorities + 1, n).tolist())
        if slo:
            rows = replace(rows, slo=rngs[2].choice(slo, n).tolist())
        return rows

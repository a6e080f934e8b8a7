"""Requests for the simulator: the runs that client.workloads draws, as columns of numbers.

Orders that go by client, priority or deadline need requests that differ in them: `Rows.hinted` draws these. This module
must not know policies, costs, or what becomes of a request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import numpy as np

from client import data
from client.workloads import agentic, arrivals, catalog, corpus, programs, traces
from client.workloads.arrivals import Arrivals
from client.workloads.chats import INSTRUCTIONS
from client.workloads.programs import Call
from scheduling.sequence import UNKNOWN_TOKEN, Sequence
from simulate import blocks
from simulate.blocks import Blocks
from simulate.closed_loop import ClosedLoop
from terminal.options import nearest

PACE = 0.02  # assumed seconds per token of the answers of programs in an open loop
PAGE = 16  # tokens; the beginning that prompts must share to be found in a prefix cache


@dataclass(frozen=True)
class Rows:
    """The columns of a run: arrival in seconds, prompt tokens, output tokens, and notes for the user.

    Where requests have them: client, priority (the lower first), seconds from arrival to deadline, and for how long to
    keep their pages; `limit` is the `max_tokens` that the model's answer may end
    before, None if the client named none, 0 for the output itself. `ids` are the
    prompts' tokens, equal where the texts are; in their place, `blocks` are those of a trace that names them. Without
    either prompts share no beginnings. `page_size` is that of the pages which the requests will find: where it is that
    of the blocks, these are looked up by number. `texts` and `arrivals` are those of the client's run. With `open_ended`, no
    request names a limit, whatever `limit` says of its length. `constrained`: whether its answer follows a grammar.
    `pinned` are prompts of others, with tokens equal to those of `ids` where the texts are. `calls` are those of programs, which
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
    pinned: tuple[list[int], ...] = ()

    def sequences(self) -> list[Sequence]:
        """Return a fresh sequence for each row, or the closed loop of all."""
        return ClosedLoop(list(self._fresh()), self.calls or []) if self.closed else list(self._fresh())

    def arriving(self) -> Iterator[Sequence]:
        """Yield a fresh sequence for each row; ValueError for a closed loop."""
        if self.closed:
            raise ValueError("a closed loop of programs is served by one engine. Use `run`, or add --open-loop")
        return self._fresh()

    def _fresh(self) -> Iterator[Sequence]:
        """Yield a fresh sequence for each row; prompts without contents are zeros, and equally long ones share a list."""
        rows = zip(
            self.at.tolist(),
            self._prompts(),
            self.output.tolist(),
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
        lengths: list[int] = self.prompt.tolist()
        if self.ids is not None:
            yield from self.ids
        elif self.blocks is None:
            zeros = {p: [0] * p for p in dict.fromkeys(lengths)}
            yield from (zeros[p] for p in lengths)
        elif self.by_number:
            # The tokens of no other request, whose number alone matters, without a list that holds them.
            yield from (cast("list[int]", range(i, i + p)) for i, p in enumerate(lengths))
        else:
            yield from (self.blocks.tokens(i, p) for i, p in enumerate(lengths))

    @property
    def by_number(self) -> bool:
        """Whether a page is a block of the trace, so that blocks are looked up by number and nothing is hashed."""
        return self.blocks is not None and self.page_size == blocks.TOKENS

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
        """Requests per second: the rate asked for, or the trace's own; infinite when all arrive at once."""
        if self.arrivals and math.isfinite(self.arrivals.rate):
            return self.arrivals.rate
        span = float(self.at[-1] - self.at[0])
        return (len(self.at) - 1) / span if span else math.inf

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

    def copied(self, copies: int, seed: int) -> Rows:
        """Return `copies` copies of the requests at once, each with contents and clients of its own.

        Each but the first begins at a random time of the run, and goes on with its first requests after its last ones.
        """
        n = len(self.at)
        span = float(self.at[-1]) * n / max(n - 1, 1)
        shifts = np.random.default_rng([seed, copies]).random(copies) * span
        shifts[0] = 0.0
        at = ((self.at[None, :] + shifts[:, None]) % span if span else np.tile(self.at, (copies, 1))).ravel()
        order = np.argsort(at, kind="stable")
        row, copy = order % n, order // n
        rows = replace(self.only(row), at=at[order], arrivals=None)
        if self.client:
            rows = replace(rows, client=[f"{self.client[r]}/{c}" for r, c in zip(row.tolist(), copy.tolist())])
        if self.ids is not None or self.calls:
            raise ValueError(
                "the prompts of this trace are texts or calls of programs, which have no copies. Leave out --copies"
            )
        return replace(rows, blocks=self.blocks and self.blocks.copied(row, copy))

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
        note = f"skipped {left_out:,} of {len(fits):,} requests that are longer than --context {context:,}"
        return self.only(np.flatnonzero(fits), note if left_out else "")

    def hinted(self, seed: int, clients: int = 0, priorities: int = 0, slo: Many[float] = ()) -> Rows:
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


# The client's arrival processes at a given rate; gamma gaps have a coefficient of variation of 2.
ARRIVALS: dict[str, Callable[[float], Arrivals]] = {
    "poisson": lambda rate: Arrivals("poisson", rate),
    "gamma": lambda rate: Arrivals("gamma", rate, 0.25),
    "uniform": lambda rate: Arrivals("constant", rate),
    "burst": lambda rate: Arrivals("burst"),
    "onoff": lambda rate: Arrivals("onoff", rate, 10.0),
    "ramp": lambda rate: Arrivals("ramp", 0.0, 2 * rate),
}


def arrivals_of(name: str, rate: float) -> Arrivals:
    """Return the arrival process of a name in ARRIVALS at `rate`, or of the client's own form, as in gamma:2:0.5."""
    if name in ARRIVALS:
        return ARRIVALS[name](rate)
    known = ", ".join(ARRIVALS)
    if ":" in name:
        process = arrivals.parse(name)
        if process.users is None:
            return process
        raise ValueError(f"{name!r} is a closed loop of users, which cannot be simulated. Use one of: {known}")
    guess = nearest(name, ARRIVALS)
    raise ValueError(f"unknown arrivals {name!r}.{guess} Use one of: {known}, or a load such as gamma:2:0.5")


def draw(
    workload: str,
    rate: float,
    count: int | None,
    seed: int = 0,
    arrivals: str = "poisson",
    context: int = corpus.USUAL_CONTEXT,
    pinned: Iterable[str] = (),
) -> Rows:
    """Draw the run that the client sends with the same workload, arrivals, number of requests, seed and context.

    `count` None takes all of a trace, and arrivals "trace" are its own. ValueError for a workload whose lengths only a
    model knows.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate is {rate:g} per second, but must be above 0. Use --rate 2")
    if count is not None and count < 1:
        raise ValueError(f"the number of requests is {count}, but must be at least 1. Use --num 100")
    if workload.partition(":")[0] in programs.KINDS and arrivals != "trace":
        process = arrivals_of(arrivals, rate)
        times = process.times(count or 100, np.random.default_rng([seed, 1]))
        return replace(of_calls(programs.draw(workload, times, seed)), arrivals=process)
    catalog.check(workload)
    if workload.partition(":")[0] in catalog.OWN_LENGTHS:
        raise ValueError(
            f"the model decides how long the answers of {workload!r} are, so they cannot be simulated before a run. Run "
            f"client.py --workload {workload} --csv run.csv and use --trace run.csv, or use --workload drawn-turns"
        )
    process = Arrivals("trace", 1.0) if arrivals == "trace" else arrivals_of(arrivals, rate)
    plan = catalog.draw(workload, count, process, seed, corpus.load(), context)
    texts = [planned.prompt for planned in plan.planned]
    numbered = _numbered(map(corpus.split, [*texts, *pinned]))
    ids = numbered[: len(texts)]
    clients = [planned.user for planned in plan.planned]
    rows = Rows(
        np.array([planned.at for planned in plan.planned]),
        np.array([len(prompt) for prompt in ids]),
        np.array([planned.num_tokens for planned in plan.planned]),
        client=clients if any(clients) else None,
        notes=tuple(plan.notes),
        ids=ids,
        texts=texts,
        arrivals=plan.arrivals,
        pinned=tuple(numbered[len(texts) :]),
    )
    if not any(planned.chat and planned.chat.keep_s is not None for planned in plan.planned):
        return rows
    turns = zip(plan.planned, ids, [planned.chat or data.Chat() for planned in plan.planned])
    calls = [
        Call(() if chat.after is None else (chat.after,), chat.think, chat.after, len(own), planned.num_tokens,
             chat.keep_s or 0.0, planned.user, planned.user, planned.at)
        for planned, own, chat in turns
    ]  # fmt: skip
    return replace(of_calls(calls, ids), client=clients, notes=rows.notes, texts=texts, arrivals=rows.arrivals)


def of_calls(calls: list[Call], contents: Iterable[list[int]] = (), instructions: int = INSTRUCTIONS) -> Rows:
    """Return the calls of programs in a closed loop; `contents` are the fresh tokens of all calls, where these are known.

    Otherwise each call has tokens of its own, and all conversations begin with the same `instructions`.
    """
    unused, known = itertools.count(instructions), iter(contents)
    ids: list[list[int]] = []
    for call in calls:
        own = next(known, None)
        if own is None:
            own = [*range(instructions if call.on is None else 0), *itertools.islice(unused, call.fresh)]
        if call.on is not None:
            # UNKNOWN_TOKEN is what a simulated answer consists of, so a prompt finds the pages of its answers.
            own = [*ids[call.on], *[UNKNOWN_TOKEN] * calls[call.on].answer, *own]
        ids.append(own)
    at, output, keep_s = ([getattr(call, name) for call in calls] for name in ("at", "answer", "keep_s"))
    lengths = np.array([*map(len, ids)])
    return Rows(np.array(at), lengths, np.array(output), keep_s=keep_s, ids=ids, calls=calls, closed=True)


def _numbered(prompts: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """Give equal tokens equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [[numbers.setdefault(token, len(numbers)) for token in prompt] for prompt in prompts]


def read(path: Path) -> Rows:
    """Read a trace in any form that the client reads, with its own lengths; the first request arrives at 0."""
    trace = traces.read(path)
    notes, calls = trace.notes(), None
    if any(row.session or row.after for row in trace.rows):
        trace.rows, calls = map(list, zip(*agentic.linked(trace.rows)))
    estimated = sum(1 for row in trace.rows if row.prompt and not corpus.is_exact(row.prompt))
    if estimated:
        notes.append(
            f"{estimated:,} prompts of the trace are text, counted as one token per {corpus.CHARACTERS_PER_TOKEN:g} "
            "characters"
        )
    texts, numbered = (any(getattr(row, name) for row in trace.rows) for name in ("prompt", "blocks"))
    ids = _numbered(_tokens(i, row) for i, row in enumerate(trace.rows)) if texts else None
    clients, priorities = ([getattr(row, name) for row in trace.rows] for name in ("user", "priority"))
    limits, constrained = [row.limit for row in trace.rows], [row.constrained for row in trace.rows]
    return Rows(
        np.array([call.at for call in calls] if calls else [row.at for row in trace.rows]),
        np.array([len(prompt) for prompt in ids] if ids else [row.prompt_tokens for row in trace.rows]),
        np.array([row.num_tokens for row in trace.rows]),
        client=clients if any(clients) else None,
        notes=tuple(notes),
        priority=priorities if any(priorities) else None,
        limit=limits if any(limit != 0 for limit in limits) else None,
        ids=ids,
        blocks=Blocks.of(row.blocks for row in trace.rows) if numbered and not texts else None,
        constrained=constrained if any(constrained) else None,
        calls=calls,
        closed=calls is not None,
    )


def _tokens(index: int, row: traces.Row) -> list[Hashable]:
    """Return the tokens of a trace's prompt: of its text, or of no other request."""
    return list(corpus.split(row.prompt)) if row.prompt else [(index,)] * row.prompt_tokens

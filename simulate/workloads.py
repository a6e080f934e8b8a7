"""Requests for the simulator: the runs that client.workloads draws, and traces, as columns of numbers.

This module must not know policies, costs, or what becomes of a request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from client.data import Call
from client.workloads import agentic, arrivals, catalog, corpus, programs, traces
from client.workloads.arrivals import Arrivals
from client.workloads.chats import INSTRUCTIONS
from scheduling.sequence import UNKNOWN_TOKEN
from simulate.blocks import Blocks
from simulate.rows import Rows
from terminal.options import nearest

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
) -> Rows:
    """Draw the run that the client sends with the same workload, arrivals, number of requests, seed and context.

    `count` None takes all of a trace, and arrivals "trace" are its own. ValueError for a workload whose lengths only a
    model knows.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate is {rate:g} per second, but must be above 0. Use --rate 2")
    if count is not None and count < 1:
        raise ValueError(f"the number of requests is {count}, but must be at least 1. Use --num 100")
    if catalog.is_programs(workload):
        process = arrivals_of(arrivals, rate)
        return replace(of_calls(programs.drawn(workload, count or 100, process, seed)), arrivals=process)
    catalog.check(workload)
    if workload.partition(":")[0] in catalog.OWN_LENGTHS:
        raise ValueError(
            f"the model decides how long the answers of {workload!r} are, so they cannot be simulated before a run. Run "
            f"./eb load --workload {workload} --csv run.csv and use --trace run.csv, or use --workload drawn-turns"
        )
    process = Arrivals("trace", 1.0) if arrivals == "trace" else arrivals_of(arrivals, rate)
    plan = catalog.draw(workload, count, process, seed, corpus.load(), context)
    texts = [planned.prompt for planned in plan.planned]
    ids = _numbered(map(corpus.split, texts))
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
    )
    calls = [
        planned.call._replace(fresh=len(own), answer=planned.num_tokens, at=planned.at)
        for planned, own in zip(plan.planned, ids)
        if planned.call
    ]
    if not calls:
        return rows
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
    notes, linked = trace.notes(), agentic.of(trace.rows)
    trace.rows, calls = [row for row, _ in linked], [call for _, call in linked if call] or None
    estimated = sum(1 for row in trace.rows if row.prompt and not corpus.is_exact(row.prompt))
    if estimated:
        notes.append(
            f"{estimated:,} prompts of the trace are text, counted as one token per {corpus.CHARACTERS_PER_TOKEN:g} "
            "characters"
        )
    texts, numbered = (any(getattr(row, name) for row in trace.rows) for name in ("prompt", "blocks"))
    ids = _numbered(_tokens(i, row) for i, row in enumerate(trace.rows)) if texts else None
    sizes = {row.block for row in trace.rows if row.blocks}
    if len(sizes) > 1:
        raise ValueError(f"{str(path)!r} has blocks of {sorted(sizes)} tokens. Use one block_size in all lines")
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
        blocks=Blocks.of((row.blocks for row in trace.rows), *sizes) if numbered and not texts else None,
        constrained=constrained if any(constrained) else None,
        calls=calls,
        closed=calls is not None,
    )


def _tokens(index: int, row: traces.Row) -> list[Hashable]:
    """Return the tokens of a trace's prompt: of its text, or of no other request."""
    return list(corpus.split(row.prompt)) if row.prompt else [(index,)] * row.prompt_tokens

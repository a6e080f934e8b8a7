"""Traces of programs: from the calls that each row of a trace waits for, the calls of programs in a closed loop.

A row that waits for others is sent `wait` seconds after the last of these. A turn of Qwen's waits for the answer to its parent,
if the trace has that, and then as long as their times are apart. Of rows without ids, those of one session are turns, each
after the one before. Of spans, which have an end, each waits for those of its trace that ended before it began. This module
must not know files.
"""

from __future__ import annotations

import graphlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import count, islice

from ..data import Call
from .traces import Row


def of(rows: Sequence[Row], programs: int | None = None) -> Sequence[tuple[Row, Call | None]]:
    """Return the rows of a trace, with their calls if it has programs, of which the first are kept; ValueError as `linked`."""
    if not any(row.session or row.after for row in rows):
        return [(row, None) for row in rows[:programs]]
    found = linked(rows)
    kept = {*islice(dict.fromkeys(call.program for _, call in found), programs)}
    return [(row, call) for row, call in found if call.program in kept]


def linked(rows: Sequence[Row]) -> list[tuple[Row, Call]]:
    """Return rows with their calls, each program's after one another; ValueError for a row that waits for itself or no other.

    Rows that wait for one another, or have a session in common, are one program. It begins with its first row that waits for none.
    """
    number = {row.id: i for i, row in enumerate(rows) if row.id}
    if unknown := [name for row in rows for name in row.after if name not in number and row.ended is None]:
        raise ValueError(
            f"a request waits for {unknown[0]!r}, which is not in the trace. Add it, or remove it from wait_for"
        )
    after = [tuple(number[name] for name in dict.fromkeys(row.after) if name in number) for row in rows]
    sessions: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        some = sessions.setdefault(row.session or f"row {i}", [])
        if row.ended is not None and not row.after:
            ended = [k for k in some if (rows[k].ended or 0.0) <= row.at]
            last = max(
                (rows[k].at for k in ended), default=0.0
            )  # what ended before this one began, it waits for already
            after[i] = tuple(k for k in ended if (rows[k].ended or 0.0) > last or rows[k].at == last)
        elif not row.id and some:
            after[i] = (some[-1],)
        some.append(i)
    program = list(range(len(rows)))

    def first(i: int) -> int:
        while program[i] != i:
            program[i] = i = program[program[i]]
        return i

    for i, parents in enumerate(after):
        for other in (*parents, sessions[rows[i].session or f"row {i}"][0]):
            low, high = sorted((first(i), first(other)))
            program[high] = low
    begins: dict[int, float] = {}
    for i, row in enumerate(rows):
        if not after[i]:
            begins[first(i)] = min(row.at, begins.get(first(i), math.inf))
    try:
        place = {i: k for k, i in enumerate(graphlib.TopologicalSorter(dict(enumerate(after))).static_order())}
    except graphlib.CycleError as error:
        names = ", ".join(repr(rows[i].id) for i in error.args[1])
        raise ValueError(f"requests wait in a circle: {names}. Remove one from the wait_for of the next") from None
    if timeless := [row for row, parents in zip(rows, after) if not parents and not math.isfinite(row.at)]:
        raise ValueError(f"request {timeless[0].id!r} waits for none and has no timestamp. Add one")
    order = sorted(range(len(rows)), key=lambda i: (begins[first(i)], first(i), place[i]))
    new = dict(zip(order, count()))
    found = []
    for i in order:
        row, begin = rows[i], begins[first(i)]
        ends = [rows[k].ended or 0.0 for k in after[i]]
        wait = row.wait if after[i] else row.wait + row.at - begin
        if row.ended is not None and ends:
            wait = max(0.0, row.at - max(ends))
        parents = tuple(new[k] for k in after[i])
        call = Call(
            parents, wait, None, row.prompt_tokens, row.num_tokens, 0.0, f"program-{first(i)}", row.session, begin
        )
        found.append((row, call))
    return found


def lines(calls: Sequence[Call], prompts: Sequence[Sequence[int]], block: int) -> Iterator[str]:
    """Yield the calls as rows of Dynamo's agentic Mooncake form; equal numbers stand for equal beginnings, in blocks of tokens."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    for i, (call, prompt) in enumerate(zip(calls, prompts)):
        ids = [-1]
        for at in range(0, len(prompt), block):
            ids.append(numbers.setdefault((ids[-1], tuple(prompt[at : at + block])), len(numbers)))
        wait = {"wait_for": [f"{parent}" for parent in call.after], "delay": 1000 * call.tool_s}
        when = wait if call.after else {"timestamp": 1000 * (call.at + call.tool_s)}
        sizes = {"input_length": len(prompt), "output_length": call.answer, "hash_ids": ids[1:]}
        yield json.dumps({"request_id": f"{i}", "session_id": call.session, **sizes, **when}) + "\n"

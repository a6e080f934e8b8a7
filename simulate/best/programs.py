"""Lower bounds on the mean time of programs: no policy, cache or order has a smaller one, on this machine with this many slots.

A program is to the bounds of `bounds.py` what a request is, with the figures below; even tool times may be known. Let w_j be the
share of call j and l_j its time alone (`shares.py`), of the prompt tokens that no cache can hold.

* Alone. No step that a call takes part in takes less time than when it is alone. So the call is in the server for at least l_j,
  and its program takes at least its longest path of times alone, tool times and host delays.
* Work. Spread the share of each row evenly over its step: one machine works at a rate of at most 1, and has worked for W, the
  sum of the w_j, before the program ends, none of it before it begins.
* Tail. Let M_j be the mean time at which the w_j are worked on. The program ends no sooner than M_j + tail_j + rest_j: from the mean to
  the end of j when it is alone, and the longest path after j. So it ends no sooner than the mean of these with weights w_j / W.
* Rows. Each row adds its own part to the steps after the begin, and no step has more rows than slots.

The largest of the bounds on the mean latency counts. This module must not know policies.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import replace
from typing import Any

import numpy as np

from client.report.programs import figures
from costs.cost import Cost, Host
from scheduling.sequence import Sequence
from simulate.best.bounds import Jobs, jobs_of, least_weighted
from simulate.best.shares import shares_of
from simulate.closed_loop import ClosedLoop
from simulate.simulator import Run


def bounds(
    loop: ClosedLoop,
    sequences: abc.Sequence[Sequence],
    cost: Cost,
    slots: int,
    host: Host | None = None,
    page_size: int = 0,
) -> tuple[float, np.ndarray]:
    """Return the least mean time, and the longest path of each program alone, in seconds, for any policy with `slots` slots.

    The `sequences` of the loop have the lengths of their answers and, with a prefix cache of a `page_size`, all `hashes`.
    """
    host, slots = host or Host(), min(slots, len(sequences))
    views = [_programs(loop, jobs_of(sequences, s, slots, host, page_size), host) for s in shares_of(cost, slots, host)]
    fixed = host.alpha0 + host.alpha1
    return max(least_weighted(jobs, np.ones(len(jobs.work))) for jobs in views) + fixed, views[0].alone + fixed


def _programs(loop: ClosedLoop, jobs: Jobs, host: Host) -> Jobs:
    """Return the programs as jobs, without what the host adds before the first call and after the last."""
    numbers = {name: i for i, name in enumerate(loop.programs)}
    program = np.array([numbers[call.program] for call in loop.calls])
    end, rest = jobs.alone.copy(), np.zeros(len(program))  # the longest paths to the end of a call, and after it
    for i, call in enumerate(loop.calls):
        end[i] += call.tool_s + max((end[p] + host.alpha1 + host.alpha0 for p in call.after), default=0.0)
    for i, call in reversed([*enumerate(loop.calls)]):
        for p in call.after:
            rest[p] = max(rest[p], host.alpha1 + host.alpha0 + call.tool_s + jobs.alone[i] + rest[i])
    work, alone = np.bincount(program, jobs.work), np.zeros(len(numbers))
    np.maximum.at(alone, program, end)
    return replace(
        jobs, arrival=np.array([*loop.began.values()]), work=work, alone=alone,
        tail=np.bincount(program, jobs.work * (jobs.tail + rest)) / work, own=np.bincount(program, jobs.own),
        steps=np.zeros(len(numbers)), rows=np.bincount(program, jobs.rows),
    )  # fmt: skip


def of(run: Run, cost: Cost, slots: int, page_size: int) -> dict[str, Any]:
    """Return the figures of the programs of a run, in seconds, and of `each`; a bound only if every call was answered.

    The slowdown of a program is what it took over its longest path alone.
    """
    loop = run.loop or ClosedLoop([], [])
    # The lengths that the answers had; a call that was never sent has the one that it asked for.
    known = [replace(seq, max_tokens=len(seq.output_ids) or seq.max_tokens) for seq in loop.sequences]
    (least, paths), times = bounds(loop, known, cost, slots, run.host, page_size), loop.times(run.host.alpha1)
    each = [
        {"program": name, "began_s": loop.began[name], "took_s": times.get(name), "alone_s": alone, "calls": len(some)}
        for (name, some), alone in zip(loop.programs.items(), paths.tolist())
    ]
    found = figures(times, dict(zip(loop.programs, paths.tolist())), run.requests)
    # Completed programs are the lucky ones, whose mean may be below the bound of all; drafts give several tokens in a step.
    if not found["failed"] and not any(seq.drafted for seq in known):
        above = round(found["mean_s"] / least - 1, 9) + 0.0  # no -0 of rounding where the bound is exact
        found |= {"least_mean_s": least, "above_least_mean": above}
    return {**found, "each": each}

"""Programs: how long each took, how much longer than alone, and how evenly. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .figures import jain
from .measure import Outcome


def figures(times: Mapping[str, float], alone: Mapping[str, float | None], calls: int) -> dict[str, Any]:
    """Return the figures of programs: the seconds of those that were completed, and the longest path `alone` of each.

    Slowdowns, what a program took over its longest path alone, are left out where paths are unknown.
    """
    found: dict[str, Any] = {"completed": len(times), "failed": len(alone) - len(times), "calls": calls}
    took = np.array([*times.values()])
    paths = [path for name in times if (path := alone[name])]
    measured = {"s": took, "slowdown": took / paths if len(paths) == len(took) else np.array([])}
    for name, values in measured.items():
        if len(values):
            found |= {f"mean_{name}": float(values.mean()), f"p99_{name}": float(np.quantile(values, 0.99))}
    if times:
        found["p50_s"] = float(np.median(took))
    if len(measured["slowdown"]):
        found["jain_slowdown"] = jain(measured["slowdown"].tolist())
    return found


def of(
    outcomes: Sequence[Outcome], known: Mapping[str, tuple[int, float | None]]
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the figures of the programs that began, None if there are none, and each; `known` are calls and longest path.

    A program fails if one of its calls does, or was not sent.
    """
    calls: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.program in known:
            calls[outcome.program].append(outcome)
    each: list[dict[str, Any]] = []
    for name, own in calls.items():
        (number, alone), began = known[name], min(o.intended for o in own)
        is_done = len(own) == number and not any(o.error for o in own)
        took = max(o.ended for o in own) - began if is_done else None
        each.append({"program": name, "began_s": began, "took_s": took, "alone_s": alone, "calls": len(own)})
    if not each:
        return None, []
    times = {one["program"]: one["took_s"] for one in each if one["took_s"] is not None}
    return figures(times, {one["program"]: one["alone_s"] for one in each}, sum(one["calls"] for one in each)), each

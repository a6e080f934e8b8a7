"""The steps of several runs as a page draws them, side by side: cut at one time, and small enough to send.

It must not know who simulated the runs, or how a page draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scheduling.iteration import Iteration
from scheduling.stretches import Stretch, Stretches

MAX_WEIGHT = 60_000  # of all records of an answer, which is then smaller than about 6 MB: a member weighs 1
RECORD_WEIGHT = 4


def stretches(iterations: Iterable[Iteration]) -> list[Stretch]:
    """Return the steps of a run, equal ones together."""
    recorded = Stretches()
    for iteration in iterations:
        recorded.add(iteration)
    return list(recorded.kept)


def cut(lanes: Iterable[Sequence[Stretch]], limit: int) -> float | None:
    """Return when the first of the lanes has reached its part of the weight that an answer may have; None if none has."""
    lanes = list(lanes)
    ends = []
    for steps in lanes:
        weight = 0
        for step in steps:
            weight += RECORD_WEIGHT + len(step.members)
            if weight > limit // len(lanes):
                ends.append(step.t)
                break
    return min(ends, default=None)


def records(
    steps: Iterable[Stretch], zero: float, end: float | None, names: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Return the records of the steps until `end`, with times since `zero`, and with the requests' new names."""
    result = []
    for step in steps:
        if end is not None and step.t >= end:
            break
        record = step.to_dict()
        record["t"], record["seconds"] = round(step.t - zero, 6), round(record["seconds"], 7)
        for entry in (*record["members"], *record["left"]):
            entry["id"] = names.get(entry["id"], entry["id"])
        for name in ("joined", "displaced"):
            if name in record:
                record[name] = [names.get(id, id) for id in record[name]]
        result.append(record)
    return result

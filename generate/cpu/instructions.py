"""Which instructions of this processor multiply bfloat16 fastest: measured at the first start and kept, or told.

Their speeds cannot be read from the processor's list of features: where a hypervisor hides AMX, float32 instructions
are twice as fast as bfloat16's dot products. A choice holds for all numbers of rows, since a row's bits differ between
ways. This module must not know what is multiplied: it is given the function that measures.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

WAYS = ("tiles", "dot", "fma")  # of linear_bf16.h; of equals, the first is taken
ROWS = (1, 16, 64)  # memory limits the first, arithmetic the last
TURNS = 5  # the best of them counts: a noisy neighbor only slows down
CLEARLY_FASTER = 0.95  # of another's time; less than that may be noise, and a restart should choose the same

Measure = Callable[[str, int], float]  # seconds of one product, given the way and the number of rows
Times = dict[str, list[float]]  # of each way, for ROWS


class InstructionError(ValueError):
    """EB_KERNELS names what this processor cannot do; the message names what it can."""


def choose_way(possible: Sequence[str], wanted: str, measure: Measure, kept: Path | None) -> str:
    """Return the way that is `wanted`, or the fastest: of all for "", without tiles for "vectors".

    possible: those that this processor has, one at least, in the order of WAYS. kept: the file with the times that were
    measured before, or to be measured now; without one, they are measured in every process.
    """
    vectors = [way for way in possible if way != "tiles"]
    allowed = {"": list(possible), "vectors": vectors, **{way: [way] for way in possible}}.get(wanted)
    if not allowed:
        names = ", ".join([*possible, "vectors", "off"])
        raise InstructionError(
            f"EB_KERNELS={wanted} is not possible on this processor. Unset it, or use one of {names}"
        )
    if len(allowed) == 1:
        return allowed[0]
    times = _read(kept, possible) or _measure(possible, measure, kept)
    best = allowed[0]
    for way in allowed[1:]:
        ratio = math.prod(new / old for new, old in zip(times[way], times[best])) ** (1 / len(ROWS))
        if ratio < CLEARLY_FASTER:
            best = way
    return best


def _measure(possible: Sequence[str], measure: Measure, kept: Path | None) -> Times:
    times = {way: [math.inf] * len(ROWS) for way in possible}
    for _ in range(TURNS):
        for i, rows in enumerate(ROWS):
            for way in possible:
                times[way][i] = min(times[way][i], measure(way, rows))
    log.info("seconds of a product with %s rows: %s", ROWS, times)
    # Another process may have measured meanwhile: the same choice in all of them gives the same text.
    return _read(kept, possible) or _keep(kept, times)


def _read(kept: Path | None, possible: Sequence[str]) -> Times | None:
    """Return the times in the file, or None where it does not have all that are possible now."""
    try:
        found = json.loads(kept.read_text()) if kept else {}
        times = {way: [float(seconds) for seconds in found[way]] for way in possible}
    except (OSError, ValueError, TypeError, LookupError):
        return None
    whole = all(len(of_way) == len(ROWS) and all(0 < t < math.inf for t in of_way) for of_way in times.values())
    return times if whole else None


def _keep(kept: Path | None, times: Times) -> Times:
    try:
        if kept:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=kept.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(times, file)
            os.replace(name, kept)
    except OSError as error:
        log.info("cannot write %s, so the next start measures again: %s", kept, error)
    return times

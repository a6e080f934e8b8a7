"""How many processors this process may use. It must not import torch: a fleet asks before any model is loaded."""

from __future__ import annotations

import functools
import math
import os

from generate import cgroups


@functools.cache  # since a server later keeps the threads that may ask on one of them
def cores() -> int:
    """Return the number of processors that this process may use, within the quota of its control groups."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    return math.ceil(min(count, cgroups.processors()))

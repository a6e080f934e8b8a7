"""How many processors this process may use. It must not import torch: a fleet asks before any model is loaded."""

from __future__ import annotations

import functools
import os
from pathlib import Path

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of computing in a period, or "max"


@functools.cache  # since a server later keeps the threads that may ask on one of them
def cores() -> int:
    """Return the number of processors that this process may use, within the limit of a container."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    try:
        quota, period = map(int, CPU_LIMIT.read_text().split())
        return min(count, -(-quota // period))
    except (OSError, ValueError):  # no limit
        return count

"""The limits that Linux's control groups, of version 1 or 2, set for this process.

A limit of any parent group holds as well. It must not import torch, and does not know what a limit is for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # tests read another tree


def folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of its parents, in each hierarchy that may have `controller`."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths = {name: path for _, names, path in (line.split(":", 2) for line in groups) for name in names.split(",")}
    for mount in mounts:
        before, found, after = mount.partition(" - cgroup")
        name = "" if after.startswith("2") else controller  # version 2 has one hierarchy for all controllers
        if not found or name not in paths or (name and name not in after.split()[-1].split(",")):
            continue
        top, point = before.split()[3:5]
        group, inner = PurePosixPath(paths[name]), PurePosixPath()
        if group.is_relative_to(top):  # in a container `point` may already be the process's own group
            inner = group.relative_to(top)
        folder = root / point.lstrip("/") / inner
        yield from (folder, *folder.parents[: len(inner.parts)])


def free_memory(root: Path = ROOT) -> float:
    """Return the bytes that are left under the tightest limit, or infinity. Cached files do not count as used."""
    free = math.inf
    for folder in folders("memory", root):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
                left = int((folder / limit).read_text()) - int((folder / used).read_text()) + _cached(folder)
                free = min(free, max(0, left))
    return free


def _cached(folder: Path) -> int:
    """Return the bytes of files that the kernel drops first; version 1 counts those of inner groups apart."""
    lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    counts = {name: int(count) for name, count in lines}
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


def processors(root: Path = ROOT) -> float:
    """Return how many processors the quotas allow, or infinity."""
    most = math.inf
    for folder in folders("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                if quota > 0:  # version 1 writes -1 for no quota
                    most = min(most, quota / period)
    return most

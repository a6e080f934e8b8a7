"""The limits that Linux's control groups, of version 1 or 2, set for this process. It must not import torch."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
GROUP = re.compile(r"^\d+:(.*?):/(.*)$", re.M)  # controllers, none in version 2, and path
MOUNT = re.compile(r"^(?:\S+ ){4}/(\S+) .* - cgroup(2?) \S+ (\S+)$", re.M)  # path, version, and options


def folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of its parents, whose limits hold as well.

    In a container the path of a group may begin outside of what is mounted. Folders that do not exist have no limits.
    """
    with contextlib.suppress(OSError):  # not Linux
        groups = GROUP.findall((root / "proc/self/cgroup").read_text())
        for point, version, options in MOUNT.findall((root / "proc/self/mountinfo").read_text()):
            for names, path in groups:
                if not names if version else controller in {*names.split(",")} & {*options.split(",")}:
                    folder = root / point / path
                    yield from (folder, *folder.parents)


def free_memory(root: Path = ROOT) -> float:
    """Return the bytes that are left under the tightest limit, or infinity. Cached files do not count as used."""
    free = math.inf
    for folder in folders("memory", root):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                # Version 1 counts those of inner groups in the second one.
                cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
                free = min(free, max(0, left + sum(map(int, cached[-1:]))))
    return free


def processors(root: Path = ROOT) -> float:
    """Return how many processors the quotas allow, or infinity."""
    most = math.inf
    for folder in folders("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                most = min(most, quota / period if quota > 0 else most)  # version 1 writes -1 for no quota
    return most

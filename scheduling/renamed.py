"""Former names of hooks and attributes in users' policy files, which work for one more release with a warning.

This file and its two uses in `policy.py` go with that release.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

HOOKS = {"displace": "preempt", "on_displace": "on_preempt", "obstacle": "blocked_by", "share": "allocate_tokens"}
ATTRIBUTES = {"apart": "separate_prefill", "displaces": "preempts"}


class RenamedWarning(DeprecationWarning):
    """A policy file uses a name that the next release will not know."""


class Renamed:
    """A former attribute of a policy: reads and writes go to the new one."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, target: object | None, owner: type) -> Any:
        return getattr(owner if target is None else target, self.new)

    def __set__(self, target: object, value: object) -> None:
        warn(type(target), self.old, self.new)
        setattr(target, self.new, value)


def adopt(cls: type) -> None:
    """Give a policy class the new names of what it declares by former ones, with a RenamedWarning for each.

    A hook keeps its former name too, so that `super()` finds the next one by either name.
    """
    for old, new in HOOKS.items():
        if old in vars(cls):
            warn(cls, old, new)
            setattr(cls, new, vars(cls)[old])
        elif new in vars(cls):
            setattr(cls, old, vars(cls)[new])
    for old, new in ATTRIBUTES.items():
        if old in vars(cls):
            warn(cls, old, new)
            setattr(cls, new, vars(cls)[old])
            delattr(cls, old)


def warn(cls: type, old: str, new: str) -> None:
    """Warn that a class uses a former name, with the file that it is in."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__
    warnings.warn(f"{file}: {old} is now called {new}. Rename it; {old} works until the next release",
                  RenamedWarning, stacklevel=4)  # fmt: skip

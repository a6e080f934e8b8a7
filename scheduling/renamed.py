"""Former names in users' policy files, which work for one more release with a warning.

This file and its uses in `policy.py` go with that release.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any

from scheduling.claims import Claims
from scheduling.options import Option

HOOKS = {"displace": "preempt", "on_displace": "on_preempt", "obstacle": "blocked_by", "share": "allocate_tokens"}
ATTRIBUTES = {"apart": "separate_prefill", "displaces": "preempts"}
CLAIMS = ("conserving", "fair", "patience", "refuses", "holds", "overruns", "heeds")


class RenamedWarning(DeprecationWarning):
    """A policy file uses a name that the next release will not know."""


class FormerAttribute:
    """A former attribute of a policy: reads and writes go to the new one."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, target: object | None, owner: type) -> Any:
        return getattr(owner if target is None else target, self.new)

    def __set__(self, target: object, value: object) -> None:
        _warn(type(target), self.old, self.new, stacklevel=3)
        setattr(target, self.new, value)


class FormerField:
    """A former name in what hooks receive: reading it reads the new one, with a RenamedWarning."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __get__(self, target: object | None, owner: type) -> Any:
        warnings.warn(
            f"{self.old} of {owner.__name__} is now called {self.new}. Rename it; {self.old} works until the next release",
            RenamedWarning,
            stacklevel=2,
        )
        return getattr(owner if target is None else target, self.new)


class FormerClaim:
    """A former attribute of a policy that is one of its claims now."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, target: Any, owner: type) -> Any:
        return getattr(getattr(target, "claims", Claims()), self.name)

    def __set__(self, target: Any, value: object) -> None:
        _warn(type(target), self.name, f"claims.{self.name}", stacklevel=3)
        target.__dict__.setdefault("_claimed", {})[self.name] = value
        if hasattr(target, "claims"):  # otherwise the `__init__` of Policy calls `with_former`
            target.claims = replace(target.claims, **{self.name: value})


def with_former(claims: Claims, target: object) -> Claims:
    """Return the claims with those that a policy made by former attributes before it had claims."""
    return replace(claims, **vars(target).get("_claimed", {}))


def adopt(cls: type) -> None:
    """Give a policy class the new names of what it declares by former ones, with a RenamedWarning for each."""
    for old, new in HOOKS.items():  # a class has both names, so that `super()` finds the next hook by either
        if old in vars(cls):
            _warn(cls, old, new)
            setattr(cls, new, vars(cls)[old])
        elif new in vars(cls):
            setattr(cls, old, vars(cls)[new])
    for old, new in ATTRIBUTES.items():
        if old in vars(cls):
            _warn(cls, old, new)
            setattr(cls, new, vars(cls)[old])
            delattr(cls, old)
    former = {name: vars(cls)[name] for name in CLAIMS if name in vars(cls)}
    for name, value in former.items():
        _warn(cls, name, f"claims.{name}")
        if not isinstance(value, Option | property):  # their value is that of each object
            delattr(cls, name)
    if former:
        _claim_after_init(cls, former)


def _claim_after_init(cls: Any, former: dict[str, object]) -> None:
    """Let each object of a class make these claims, unless its `__init__` made others."""
    own = vars(cls).get("__init__")

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        own(self, *args, **options) if own is not None else super(cls, self).__init__(*args, **options)
        claimed = vars(self).get("_claimed", {})
        missing = {name: value for name, value in former.items() if name not in claimed}
        values = {name: getattr(self, name) if name in vars(cls) else value for name, value in missing.items()}
        self.claims = replace(self.claims, **values)

    cls.__init__ = __init__


def _warn(cls: type, old: str, new: str, stacklevel: int = 4) -> None:
    """Warn that a class uses a former name, with the file that it is in."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__
    warnings.warn(
        f"{file}: {old} is now called {new}. Rename it; {old} works until the next release",
        RenamedWarning,
        stacklevel=stacklevel,
    )

"""Batching policies, one a file: the file's name is the policy's name, a hyphen for each underscore.

There is no registry to edit: a new file here is a new policy.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from scheduling.policy import Policy


def names() -> list[str]:
    """Return the names of all policies."""
    return sorted(p.stem.replace("_", "-") for p in Path(__file__).parent.glob("[!_]*.py"))


def check_name(name: str) -> None:
    """Raise ValueError with the nearest match when there is no such policy."""
    if name not in names():
        near = get_close_matches(name, names(), 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown policy {name!r}.{guess} Use one of: {', '.join(names())}")


def get_policy(name: str, **options: Any) -> Policy:
    """Return the policy called `name`, made with `options`."""
    check_name(name)
    policy = import_module(f"policies.{name.replace('-', '_')}").Policy(**options)
    assert isinstance(policy, Policy)
    return policy

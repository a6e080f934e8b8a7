"""A request as part of a program, as `serving/programs.py` makes it and inferences have it."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """A request as part of a program: `after` are the ids of its parents, `depth` the calls in the longest chain to it."""

    program: str
    session: str
    parent: str  # the session that started this one
    depth: int
    after: tuple[str, ...]

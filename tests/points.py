"""What a quick run leaves to `./test.sh --all`: most points of a parametrized test, and half of a simulated sample."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def points(quick: int, *rows: Any) -> list[Any]:
    """Return the values of a parametrized test, of which only the first `quick` are no part of `full` alone."""
    return [*rows[:quick], *(pytest.param(*_row(row), marks=pytest.mark.full) for row in rows[quick:])]


def sample(n: int) -> int:
    """Return how many of `n` a simulation draws in this run."""
    return n if settings.default.max_examples >= settings.get_profile("full").max_examples else n // 2


def _row(row: Any) -> tuple[Any, ...]:
    return row if type(row) is tuple else (row,)  # a named tuple is one value

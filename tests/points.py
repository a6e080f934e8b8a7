"""Parametrized tests of which the quick run takes only the first points."""

from __future__ import annotations

from typing import Any

import pytest


def points(quick: int, *rows: Any) -> list[Any]:
    """Return the values of a parametrized test, of which only the first `quick` are no part of `full` alone."""
    return [*rows[:quick], *(pytest.param(*_row(row), marks=pytest.mark.full) for row in rows[quick:])]


def _row(row: Any) -> tuple[Any, ...]:
    return row if type(row) is tuple else (row,)  # a named tuple is one value

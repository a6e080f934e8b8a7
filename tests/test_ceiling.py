"""A ceiling on lines: a change that needs more raises its row here, with the reason in its commit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support import ROOT

ROOMS = (
    "api", "batch_files", "client", "costs", "generate", "integrations", "launch", "models", "observe", "policies", "routing",
    "scheduling", "serving", "simulate", "terminal",
)  # fmt: skip
CEILING = {
    "product": 65_510, "the root": 1_137, "api": 8_793, "batch_files": 927, "client": 8_016, "costs": 979, "generate": 6_294,
    "integrations": 5_093, "launch": 3_444, "models": 5_459, "observe": 1_148, "policies": 3_496, "routing": 339,
    "scheduling": 4_009, "serving": 2_249, "simulate": 13_233, "terminal": 894,
    "tests": 58_940, "dev": 6_569, "docs": 6_250,
}  # fmt: skip


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def counted(what: str) -> int:
    """Return the lines of a room, or of what the table names besides."""
    if what == "product":
        return sum(map(counted, [*ROOMS, "the root"]))
    if what == "the root":
        return lines([*ROOT.glob("*.py"), ROOT / "eb"])
    return lines((ROOT / what).rglob("*.md" if what == "docs" else "*.py"))


@pytest.mark.parametrize("what", CEILING)
def test_there_are_no_more_lines_than_the_table_allows(what: str) -> None:
    assert counted(what) <= CEILING[what]

"""A ceiling on lines: a change that needs more raises its row here, with the reason in its commit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support import ROOT

ROOMS = (
    "api", "batch_files", "client", "costs", "engines", "fleet", "front", "generate", "launch", "models", "observe",
    "policies", "scheduling", "serving", "simulate", "terminal",
)  # fmt: skip
CEILING = {
    "product": 64_789, "the root": 1_341, "api": 9_324, "batch_files": 1_070, "client": 8_091, "costs": 1_051,
    "engines": 1_155, "fleet": 1_154, "front": 3_512, "generate": 6_124, "launch": 2_296, "models": 5_530,
    "observe": 1_095, "policies": 3_037, "scheduling": 3_927, "serving": 2_181, "simulate": 13_109, "terminal": 792,
    "tests": 59_065, "benchmarks and tools": 6_832, "docs": 6_425,
}  # fmt: skip


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def counted(what: str) -> int:
    """Return the lines of a room, or of what the table names besides."""
    if what == "product":
        return sum(map(counted, [*ROOMS, "the root"]))
    if what == "the root":
        return lines([*ROOT.glob("*.py"), ROOT / "eb"])
    if what == "benchmarks and tools":
        return counted("benchmarks") + counted("tools")
    return lines((ROOT / what).rglob("*.md" if what == "docs" else "*.py"))


@pytest.mark.parametrize("what", CEILING)
def test_there_are_no_more_lines_than_the_table_allows(what: str) -> None:
    assert counted(what) <= CEILING[what]

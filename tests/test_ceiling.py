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
    "product": 65_437, "the root": 1_137, "api": 8_790, "batch_files": 927, "client": 7_943, "costs": 980, "generate": 6_294,
    "integrations": 5_101, "launch": 3_444, "models": 5_459, "observe": 1_148, "policies": 3_496, "routing": 339,
    "scheduling": 4_009, "serving": 2_244, "simulate": 13_232, "terminal": 894,
    "tests": 58_728, "dev": 6_529, "docs": 6_216,
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

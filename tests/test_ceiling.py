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
    "product": 62_591, "the root": 1_125, "api": 8_836, "batch_files": 948, "client": 7_552, "costs": 949, "generate": 6_151,
    "integrations": 5_035, "launch": 2_597, "models": 5_512, "observe": 1_091, "policies": 3_037, "routing": 339,
    "scheduling": 3_977, "serving": 2_189, "simulate": 12_395, "terminal": 858,
    "tests": 54_984, "dev": 6_018, "docs": 5_694,
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

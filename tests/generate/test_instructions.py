"""The fastest instructions are found by measuring once, and an override is obeyed or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from generate.cpu.instructions import InstructionError, Measure, choose_way

ALL = ("tiles", "dot", "fma")


def speeds(tiles: float = 1.0, dot: float = 1.0, fma: float = 1.0) -> Measure:
    """Return a measure of products that take these seconds a row."""
    seconds = {"tiles": tiles, "dot": dot, "fma": fma}
    return lambda way, rows: seconds[way] * rows


def refuse(way: str, rows: int) -> float:
    raise AssertionError(f"{way} was measured")


@pytest.mark.parametrize(
    ("possible", "wanted", "measure", "chosen"),
    [
        (ALL, "", speeds(1, 10, 5), "tiles"), (ALL, "", speeds(9, 10, 5), "fma"), (ALL, "", speeds(9, 4, 5), "dot"),
        (("dot", "fma"), "", speeds(dot=1.0, fma=0.97), "dot"),  # a small difference may be noise
        (("dot", "fma"), "", speeds(dot=1.0, fma=1.03), "dot"),
        (ALL, "vectors", speeds(1, 10, 5), "fma"), (ALL, "vectors", speeds(1, 5, 10), "dot"),
        *((ALL, way, refuse, way) for way in ALL), *(((way,), "", refuse, way) for way in ALL),
    ],
)  # fmt: skip
def test_the_fastest_way_is_taken_of_those_that_an_override_leaves(
    possible: tuple[str, ...], wanted: str, measure: Measure, chosen: str
) -> None:
    assert choose_way(possible, wanted, measure, None) == chosen


def test_a_neighbor_that_disturbs_some_products_changes_nothing() -> None:
    calls = 0

    def disturbed(way: str, rows: int) -> float:
        nonlocal calls
        calls += 1
        return speeds(dot=2, fma=1)(way, rows) * (50 if calls % 3 else 1)

    assert choose_way(("dot", "fma"), "", disturbed, None) == "fma"


def test_a_way_must_be_fast_for_few_and_many_rows() -> None:
    def measure(way: str, rows: int) -> float:
        return {1: 1.0, 16: 1.0, 64: 0.9}[rows] if way == "fma" else {1: 0.5, 16: 1.0, 64: 1.0}[rows]

    assert choose_way(("dot", "fma"), "", measure, None) == "dot"


def test_what_was_measured_is_kept_for_later_starts(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "times.json"
    assert choose_way(ALL, "", speeds(9, 10, 5), kept) == "fma"
    assert choose_way(ALL, "", refuse, kept) == "fma"
    assert choose_way(ALL, "vectors", refuse, kept) == "fma"
    assert choose_way(("dot", "fma"), "", refuse, kept) == "fma"  # tiles were taken away
    assert [path.name for path in kept.parent.iterdir()] == ["times.json"]


def test_a_way_that_was_not_measured_is_measured(tmp_path: Path) -> None:
    kept = tmp_path / "times.json"
    assert choose_way(("dot", "fma"), "", speeds(dot=3, fma=2), kept) == "fma"
    assert choose_way(ALL, "", speeds(1, 3, 2), kept) == "tiles"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"dot": 1, "fma": 1}', '{"dot": [1, 1], "fma": [1, 1]}', '{"dot": [1, 1, NaN], "fma": [1, 1, 1]}',
     '{"dot": [1, 1, 1], "fma": [0, 1, 1]}', '{"dot": ["a", 1, 1], "fma": [1, 1, 1]}', "\x00"],
)  # fmt: skip
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    kept = tmp_path / "times.json"
    kept.write_text(text)
    assert choose_way(("dot", "fma"), "", speeds(dot=2, fma=1), kept) == "fma"
    assert choose_way(("dot", "fma"), "", refuse, kept) == "fma"


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for kept in (tmp_path / "file" / "times.json", None):
        assert choose_way(("dot", "fma"), "", speeds(dot=2, fma=1), kept) == "fma"


def test_processes_that_measure_at_once_agree(tmp_path: Path) -> None:
    kept = tmp_path / "times.json"

    def measure(way: str, rows: int) -> float:
        if not kept.exists():  # another process is done first
            assert choose_way(("dot", "fma"), "", speeds(dot=1, fma=2), kept) == "dot"
        return speeds(dot=2, fma=1)(way, rows)

    assert choose_way(("dot", "fma"), "", measure, kept) == "dot"


@pytest.mark.parametrize("wanted", ["tiles", "tile", "FMA"])
def test_an_override_that_is_not_possible_is_refused_with_those_that_are(wanted: str) -> None:
    with pytest.raises(InstructionError, match=f"{wanted} .* dot, fma, vectors, off"):
        choose_way(("dot", "fma"), wanted, refuse, None)

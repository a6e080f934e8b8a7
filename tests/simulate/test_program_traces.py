"""Traces of programs: Dynamo's agentic Mooncake form, turns of a session, and spans of OpenTelemetry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulate import workloads
from simulate.rows import Rows
from tests.simulate.test_programs import serve, times_of
from tests.support.simulate import run_command


def read(tmp_path: Path, *rows: dict[str, Any]) -> Rows:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return workloads.read(path)


def row(id: str, output: int, **more: Any) -> dict[str, Any]:
    return {"request_id": id, "input_length": 1, "output_length": output, **more}


def span(id: str, begin: float, end: float, output: int) -> dict[str, Any]:
    usage = {"input": 1, "output": output}
    return {
        "traceId": "t", "spanId": id, "startTimeUnixNano": str(int(begin * 1e9)), "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": [{"key": f"gen_ai.usage.{k}_tokens", "value": {"intValue": str(v)}} for k, v in usage.items()],
    }  # fmt: skip


def test_rows_wait_for_others_and_a_tool(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        row("d", 2, wait_for=["b", "c"]),
        row("a", 2, timestamp=5000, session_id="s"),
        row("c", 2, wait_for=["a"], delay=400, tool_wait_ms=600),
        row("b", 4, wait_for=["a"]),
    )
    assert times_of(serve(rows, "dynamic", 2)) == [8]
    assert [call.program for call in rows.calls or ()] == ["program-0"] * 4


def test_rows_of_a_session_without_ids_are_turns(tmp_path: Path) -> None:
    first, later = row("", 2, session_id="s", timestamp=0), row("", 2, session_id="s", delay=5000)
    assert times_of(serve(read(tmp_path, first, later), "dynamic")) == [9]


def test_spans_wait_for_those_that_ended_before_they_began(tmp_path: Path) -> None:
    spans = [span("a", 1, 3, 2), span("b", 3, 7, 4), span("c", 3.5, 5, 2), span("d", 8, 9, 2)]
    other = {"traceId": "t", "spanId": "tool", "attributes": []}
    rows = read(tmp_path, {"resourceSpans": [{"scopeSpans": [{"spans": [*spans, other]}]}]})
    assert [(call.after, call.tool_s) for call in rows.calls or ()] == [((), 0), ((0,), 0), ((0,), 0.5), ((1, 2), 1)]
    assert times_of(serve(rows, "dynamic", 2)) == [9]


@pytest.mark.parametrize("page_size", [16, 512])
def test_a_saved_trace_gives_the_same_times(tmp_path: Path, capsys: pytest.CaptureFixture[str], page_size: int) -> None:
    path = str(tmp_path / "saved.jsonl")
    line = f"run dynamic+program-fcfs --max-batch-size 4 --page-size {page_size}".replace(" --page-size 16", "")
    size = [] if page_size == 16 else ["--kv-tokens", "1024000"]
    told, _ = run_command(
        capsys, *line.split(), *size, "--workload", "agents", "--num", "12", "--rate", "5", "--save-trace", path
    )
    again, _ = run_command(capsys, *line.split(), *size, "--trace", path)
    mine, other = (found["simulation"]["programs"] for found in (told, again))
    assert {key: pytest.approx(value) for key, value in mine.items()} == other


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a", 1, wait_for=["x"])], "not in the trace"),
        ([row("a", 1, wait_for=["b"]), row("b", 1, wait_for=["a"])], "wait in a circle"),
        ([row("", 1, session_id="s", delay=1)], "no timestamp"),
        ([{"resourceSpans": [3]}], "cannot be read"),
    ],
)
def test_a_trace_that_could_never_be_served_is_refused(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path, *rows)


@pytest.mark.parametrize(("delay", "words"), [(-1, "below 0"), ("x", "'x' is not a number"), (True, "not a number")])
def test_a_bad_delay_is_a_bad_line(tmp_path: Path, delay: Any, words: str) -> None:
    rows = read(tmp_path, row("a", 1, timestamp=0), row("b", 1, wait_for=["a"], delay=delay))
    assert len(rows.at) == 1
    assert "line 2" in rows.notes[0]
    assert words in rows.notes[0]


def test_an_exact_bound_is_not_minus_zero(capsys: pytest.CaptureFixture[str]) -> None:
    line = "run dynamic --workload agents --num 1 --seed 1 --cost vtc-a10g"
    told, _ = run_command(capsys, *line.split())
    assert str(told["simulation"]["programs"]["above_least_mean"]) == "0.0"

"""The benchmark of the intervals: a mock server is predicted and measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import intervals, report

FIGURES = ("makespan", "mean latency", "p99 latency")


@pytest.mark.full
@pytest.mark.process
def test_runs_of_a_server_are_predicted_before_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    lines = [f"{0.5 * i},{i % 3},{20 + i % 50},{40 + i % 60}" for i in range(200)]
    trace.write_text("req_time,client,prompt_len,output_len\n" + "\n".join(lines))
    line = f"x --model mock:oracle-a@4 --policies dynamic --trace {trace} --seconds 1 --runs 2 --unseen 1 --slots 4 --json {result}"
    monkeypatch.setattr(sys, "argv", line.split())
    intervals.main()
    told = json.loads(result.read_text())
    assert [run["counted"] for run in told["runs"]] == [False, True, True]
    assert [run["load"] for run in told["runs"]] == ["trace", "ours", "ours"]
    assert told["predictions"] == 2 * len(FIGURES)
    for run in told["runs"]:
        assert tuple(run["figures"]) == FIGURES
        for predicted, low, high, measured in run["figures"].values():
            assert low <= predicted <= high
            assert 0.01 < predicted / measured < 100  # the same unit; how well they agree is the benchmark's to say
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["x", "--markdown", str(result)])
    intervals.main()
    assert len([row for row in capsys.readouterr().out.splitlines() if row.startswith("| mock")]) == 2


@pytest.mark.full
def test_only_runs_that_count_are_in_the_summary() -> None:
    figures = {
        "makespan": [10.0, 9.0, 11.0, 10.4],
        "mean latency": [1.0, 0.9, 1.1, 1.2],
        "p99 latency": [2.0, 1.5, 3.0, 2.9],
    }
    own = {"makespan": 10.4, "mean latency": 1.19, "p99 latency": 2.0}
    told = intervals.summary(
        [{"counted": True, "figures": figures, "own_steps": own}, {"counted": False, "figures": {}, "own_steps": {}}]
    )
    assert told["predictions"] == 3
    assert told["coverage"] == pytest.approx(2 / 3)
    assert told["within"] == {"makespan": 1.0, "mean latency": 0.0, "p99 latency": 0.0}
    assert told["within_by_own_steps"] == {"makespan": 1.0, "mean latency": 1.0, "p99 latency": 0.0}


@pytest.mark.full
def test_the_interval_of_repeated_measurements_is_students() -> None:
    assert report.interval([9.0, 10.0, 11.0]) == pytest.approx((8.314, 11.686), abs=1e-3)

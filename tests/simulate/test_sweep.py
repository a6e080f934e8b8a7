"""Sweeps and repeated runs on the virtual clock: from the command line and from Python."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import dynamic
from scheduling.policy import Policy
from scheduling.sequence import Sequence
from simulate import run, sweep, workloads
from simulate.__main__ import main
from simulate.commands import sweep as sweep_command
from terminal.options import Values
from tests.support import ROOT
from tests.support.simulate import run_command

FEW: dict[str, Any] = {"num": 40, "max_batch_size": 4}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write 60 requests at 2 a second, in bursts."""
    path = tmp_path / "my.csv"
    lines = [f"{(i // 6) * 3 + (i % 6) * 0.1:g},{10 + i},{5 + i % 7}" for i in range(60)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return path


class ShortPrompts(Policy):
    """An order."""

    def order(self, waiting: Any, now: float) -> list[Sequence]:
        return sorted(waiting, key=lambda seq: len(seq.prompt_ids))


class OneByOne(dynamic.Policy):
    """A loop."""

    def admit(self, waiting: Any, running: Any, budget: Any, now: float) -> int:
        return 0 if running else 1


def test_a_sweep_writes_its_figures_points_and_pictures(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = f"dynamic static --trace {trace} --rates 2 8 --repeats 3 --slo 0.5 --jobs 2 --max-batch-size 4"
    told, _ = run_command(capsys, "sweep", *line.split(), "--out", str(tmp_path / "out"))
    assert len(told["runs"]) == 2 * 2 * 3
    assert {run["request_rate"] for run in told["runs"]} == {2.0, 8.0}
    assert {run["seed"] for run in told["runs"]} == {0, 1, 2}
    picture = (tmp_path / "out" / "plots" / "sweep.svg").read_text()
    assert "(an invented machine)" in picture
    assert "seeds 0 to 2" in picture
    with (tmp_path / "out" / "plots" / "sweep.csv").open(newline="") as file:
        points = [*csv.DictReader(file)]
    drawn = {point["figure"] for point in points}
    assert drawn >= {f"{part}_{name}_ms" for part in ("p50", "p99") for name in ("ttft", "itl", "e2el")}
    assert drawn >= {"output_throughput", "request_goodput"}
    for point in points:
        some = [r for r in told["runs"] if (r["policy"], r["value"]) == (point["policy"], float(point["value"]))]
        assert float(point["mean"]) == pytest.approx(np.mean([r[point["figure"]] for r in some]))
        assert float(point["low"]) <= float(point["mean"]) <= float(point["high"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "client lag" not in page
    assert "<td></td>" not in page.partition('class="method"')[2]


def test_a_run_of_a_sweep_is_the_run_with_its_rate_and_seed(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    swept = sweep("dynamic", rates=[3], seeds=[7], trace=trace, progress=False, jobs=1).runs[0]
    alone, _ = run_command(capsys, "run", "dynamic", "--trace", str(trace), "--rate", "3", "--seed", "7")
    for key in ("p99_ttft_ms", "p50_itl_ms", "output_throughput", "request_rate", "duration"):
        assert swept[key] == alone[key]


def test_the_times_of_a_trace_are_scaled_to_a_rate_and_a_seed_shuffles_its_gaps(trace: Path) -> None:
    with pytest.raises(ValueError, match="--speed"):
        run("dynamic", trace=trace, rate=2, speed=3)
    rows = workloads.read(trace)
    own = rows.rate
    assert rows.at_rate(2 * own).at == pytest.approx(rows.at / 2)
    assert rows.shuffled(0) is rows
    one, other = rows.shuffled(1), rows.shuffled(2)
    assert (one.prompt == rows.prompt).all()
    assert one.at.tolist() != other.at.tolist()
    assert np.sort(np.diff(one.at)) == pytest.approx(np.sort(np.diff(rows.at)))
    assert one.rate == pytest.approx(own)
    bursts = sum(a < 0.2 and b < 0.2 for a, b in zip(np.diff(one.at), np.diff(one.at)[1:]))
    assert bursts >= 30  # of 40: gaps stay with their neighbors


def test_repeats_are_runs_of_the_seeds_and_one_shape_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "dynamic", "--num", "30", "--seed", "4", "--repeats", "3"]) == 0
    captured = capsys.readouterr()
    assert [run["seed"] for run in json.loads(captured.out)["runs"]] == [4, 5, 6]
    assert "means of 3 seeds" in captured.err
    assert main(["run", "dynamic", "--num", "30"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1
    assert "--repeats" in run_command(capsys, "run", "dynamic", "--seed", "1", "--seed", "2", code=2)[1]


def test_goodput_counts_the_deadlines_that_were_met() -> None:
    found = run("static", rate=4, slo=[2.0], **FEW)
    late = sum(row["latency_s"] > 2.0 for row in found.requests)
    (only,) = found.runs
    assert 0 < late < 40
    assert only["request_goodput"] == pytest.approx((40 - late) / only["duration"])


def test_classes_are_policies_and_results_are_rows() -> None:
    found = run(["dynamic", ShortPrompts, OneByOne], rate=12, seeds=range(3), workload="short-long", **FEW)
    assert {row["policy"] for row in found.requests} == {"dynamic", "dynamic+ShortPrompts", "OneByOne"}
    assert len(found.requests) == 3 * 3 * 40
    assert all(not isinstance(value, list | dict) for row in found.requests + found.steps for value in row.values())
    assert max(row["batch_size"] for row in found.steps if row["policy"] == "OneByOne") == 1
    page = (ROOT / "docs/python.md").read_text()
    assert [name for name in (found.requests[0] | found.steps[0]) if f"`{name}`" not in page] == []
    for row in found.summary():
        ttfts = [r["ttft_s"] for r in found.requests if r["policy"] == row["policy"]]
        assert row["mean_ttft_ms"] == pytest.approx(1000 * np.mean(ttfts))
        assert row["mean_ttft_ms_low"] <= row["mean_ttft_ms"] <= row["mean_ttft_ms_high"]
    assert found.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_class_of_this_process_is_swept_in_others() -> None:
    found = sweep(["dynamic", OneByOne], rates=[2, 8], seeds=range(3), jobs=2, progress=False, **FEW)
    assert len(found.runs) == 2 * 2 * 3
    assert len(found.plot().axes) == 6
    with pytest.raises(ValueError, match="run"):
        found.steps  # noqa: B018


@pytest.mark.parametrize(
    ("options", "named"),
    [({"nim": 3}, "--num"), ({"rate": -1}, "-1"), ({"seed": 3}, "seeds"), ({"out": "x"}, "./eb simulate run")],
)
def test_a_wrong_option_is_named_with_the_remedy(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run("dynamic", **options)


@pytest.mark.process
def test_the_notebook_runs_in_another_folder(tmp_path: Path) -> None:
    """Cell after cell in one process, which finds the packages as after `pip install -e .`."""
    cells = json.loads((ROOT / "docs/python.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in cells)
    for i, last in enumerate(code):  # as a notebook shows the figure that ends a cell
        if last.splitlines()[-1].endswith(".plot()"):
            code[i] += f"._repr_png_()\nprint('shown {i}')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(code)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("shown") == 2
    assert "mean TTFT" in ran.stdout


@pytest.mark.process
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ["sweep", "dynamic", "--rates", "1", "--num", "1500", "--repeats", "500", "--no-plots", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "simulate", *line], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        while process.poll() is None and len([*out.glob("runs/*.json")]) < 4:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes of the command
        _, words = process.communicate(timeout=300)
    assert process.returncode == 130, words
    assert "Traceback" not in words
    summary = json.loads((out / "summary.json").read_text())
    assert 0 < len(summary["runs"]) < 500
    assert summary["warnings"]
    assert (out / "table.md").is_file()


def test_saturation_is_the_lowest_rate_at_which_most_seeds_are_overloaded() -> None:
    overloaded = {1: [0, 0, 1], 2: [1, 1, 0], 4: [1, 1, 1]}
    runs = [{"policy": "a", "value": rate, "overloaded": bool(o)} for rate, some in overloaded.items() for o in some]
    assert sweep_command.of_sweep(Values(rates=[1, 2, 4]), runs)["saturation"] == {"a": 2}

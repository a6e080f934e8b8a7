"""Prediction intervals on machines whose noise is known: how many of the runs that the fit never saw they hold."""

from __future__ import annotations

import collections.abc as abc
import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from test_validate import alone, served_by

from client.report import plots_requests, store
from client.report.album import Album
from costs import cost as costs
from costs.cost import Affine, Cost, Host, Scaled
from costs.steps import Step, step_of_members
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.measured import calibrate, intervals, predict, validate
from simulate.measured.calibrate import Point
from simulate.measured.intervals import Interval, Noise
from simulate.simulator import Run, simulate
from tests.support.scheduling import make_scheduler

LAW = Affine(base=0.01, prefill=0.002, token=0.0004, row=0.0003, context=1e-6)
NAMES = ("makespan", "mean latency", "p99 latency")


class Machine(Cost):
    """A machine of today: all steps take longer by one factor, and each by noise that its neighbor mostly shares."""

    name = "machine"

    def __init__(self, day: int, drift: float = 0.05, noise: float = 0.1) -> None:
        self.rng = np.random.default_rng([7, day])
        self.today = float(np.exp(drift * self.rng.standard_normal()))
        self.noise, self.last = noise, 0.0

    def seconds(self, step: Step) -> float:
        self.last = 0.7 * self.last + 0.7 * float(self.rng.standard_normal())
        return LAW.seconds(step) * self.today * float(np.exp(self.noise * self.last))


def run(day: int, cost: Cost, records: bool = False) -> Run:
    """Serve the requests of a day: at half of the machine's capacity on even days, at most of it on odd ones."""
    rng = np.random.default_rng([8, day])
    at = np.cumsum(rng.exponential(1 / (9 if day % 2 else 5), 16))
    arrivals = [
        Sequence([0] * int(p), int(n), arrived_at=t)
        for t, p, n in zip(at, rng.integers(4, 40, 16), rng.integers(1, 33, 16))
    ]
    return simulate(make_scheduler("static" if day % 4 > 1 else "dynamic", 4), arrivals, cost, records=records)


@cache
def learned(law: Cost = LAW, days: int = 8) -> Noise:
    """Return the noise of the steps of some runs around a law."""
    groups = []
    for day in range(days):
        records = run(day, Machine(day), records=True).iterations
        steps = [step_of_members(record.members, day % 4 > 1) for record in records]
        groups.append((calibrate.predict(law, steps), np.array([record.seconds for record in records])))
    return Noise.of(groups)


def predicted(
    days: abc.Sequence[int], law: Cost, noise: Noise, draws: int = 20
) -> Iterator[tuple[float, Interval, float]]:
    """Yield each figure of each day as predicted, its interval, and as it was."""
    for day in days:
        expected, was = run(day, law), intervals.figures(run(day, Machine(day)))
        found = noise.intervals(partial(run, day), law, expected, draws=draws)
        for name, value in intervals.figures(expected).items():
            yield value, found[name], was[name]


def coverage(days: abc.Sequence[int], law: Cost, noise: Noise, draws: int = 20) -> float:
    held = [low <= was <= high for _, (low, high), was in predicted(days, law, noise, draws)]
    assert len(held) >= 60
    return float(np.mean(held))


def test_nine_of_ten_figures_of_runs_that_the_fit_never_saw_are_held() -> None:
    assert 0.85 <= coverage(range(100, 120), LAW, learned(), draws=10) <= 0.95


def test_a_law_that_is_a_quarter_too_fast_fails_to_hold_them() -> None:
    assert coverage(range(100, 120), Scaled(LAW, 0.8), learned(), draws=6) < 0.7


def test_without_noise_the_interval_is_the_prediction() -> None:
    still = Noise((0.0,) * 10, 0.0, 4)
    ((value, interval, was), *_) = predicted([3], LAW, still, draws=4)
    assert interval == (value, value)
    assert was != value


def calibrated(path: Path) -> Path:
    rng = np.random.default_rng(1)

    def measure(points: abc.Sequence[Point]) -> Iterator[float]:
        for point in points:
            yield LAW.seconds(point.step) * float(np.exp(0.05 * rng.standard_normal()))

    fit, rows = calibrate.calibrate(measure, calibrate.grid())
    calibrate.write(path, fit, rows, Host(), {})
    return path


def test_a_calibrated_file_has_its_noise_and_an_older_one_has_none(tmp_path: Path) -> None:
    path = calibrated(tmp_path / "cost.json")
    noise = intervals.of_cost(str(path))
    assert noise is not None
    assert np.std(noise.residuals) == pytest.approx(0.05, rel=0.5)
    assert 0.01 < noise.drift < 0.1
    assert costs.load(path)[0] == costs.load(calibrated(tmp_path / "same.json"))[0]
    older = json.loads(path.read_text())
    for point in older["points"]:
        del point["held_out"]
    path.write_text(json.dumps(older))
    assert intervals.of_cost(str(path)) is None
    assert intervals.of_cost("oracle-a") is None


def test_a_capacity_is_an_interval_around_what_the_law_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = calibrated(tmp_path / "cost.json")
    line = "plan dynamic --num 120 --max-batch-size 8 --workload uniform --itl 1 --cost"
    assert main([*line.split(), str(path)]) == 0
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)["capacities"]
    assert f"{found['replicas']} │\n" in printed.err  # of the last column, which is not cut off
    assert max(map(len, printed.err.splitlines())) <= 80
    low, high = found["interval"]
    assert low < found["rate"] < found["fails_at"] < high
    assert main([*line.split(), "oracle-a"]) == 0
    (exact,) = json.loads(capsys.readouterr().out)["capacities"]
    assert exact["interval"] == [exact["rate"], exact["fails_at"]]


def test_a_server_is_validated_with_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = calibrated(tmp_path / "cost.json")
    line = ["validate", "dynamic", "--num", "12", "--rate", "4", "--cost"]
    monkeypatch.setattr(
        validate,
        "serve",
        lambda chosen, flags, trace, *_: (alone(LAW), alone(LAW), served_by(chosen.name, Scaled(LAW, 1.02), trace)),
    )
    main([*line, str(path)])
    captured = capsys.readouterr()
    (told,) = json.loads(captured.out)["runs"]
    bounds = {c["name"]: c["interval"] for c in told["compared"] if c["interval"]}
    assert list(bounds) == list(NAMES)
    assert all(
        low < c["predicted"] < high for c in told["compared"] for low, high in [bounds.get(c["name"], (-1, 1e9))]
    )
    assert max(map(len, captured.err.partition("bounds: ")[0].splitlines())) <= 80


@pytest.mark.full
def test_a_comparison_is_predicted_with_intervals_and_drawn_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = calibrated(tmp_path / "cost.json"), tmp_path / "x"
    line = f"run dynamic --num 20 --rate 4 --max-batch-size 4 --no-plots --out {folder} --cost {path}"
    assert main(line.split()) == 0
    predict.predict(folder, str(path))
    (run_,) = json.loads((folder / "simulated.json").read_text())["compared"]
    assert list(run_["intervals"]) == list(NAMES)
    assert run_["makespan_s"] == pytest.approx(run_["simulated_makespan_s"], rel=1e-3)
    bars = list(store.read(folder).intervals("poisson:4"))
    assert [bar[:2] for bar in bars] == [("dynamic", "mean"), ("dynamic", "p99")]
    assert all(low < measured < high for _, _, (measured, _, low, high) in bars)
    album = Album(store.read(folder), [])
    plots_requests.simulated_over_measured(album, "poisson:4")
    assert [picture.name for picture in album.pictures] == ["simulated-measured.poisson-4"]

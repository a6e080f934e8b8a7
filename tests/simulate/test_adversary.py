"""The adversary: what it finds is bad for the policy, small, the same for a seed, and served alike from its file."""

from __future__ import annotations

import csv
import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from costs.cost import Host
from simulate.arena.adversary import KEPT, MEASURES, Adversary, Duel, sequences_of
from tests.support.scheduling import make_scheduler
from tests.support.simulate import COST_A, run_command


def duel(policy: str, rival: str | None, measure: str = "mean") -> Duel:
    return Duel(
        partial(make_scheduler, policy, 2), rival and partial(make_scheduler, rival, 2), COST_A, Host(), measure
    )


@pytest.mark.parametrize(
    ("policy", "rival", "measure", "least"),
    [
        ("static", "dynamic", "mean", 2.0),
        ("dynamic+sjf", "dynamic+fcfs", "slowdown", 1.5),
        ("nobatch", None, "mean", 1.2),
    ],
)
def test_a_trace_is_found_on_which_a_policy_does_badly(
    policy: str, rival: str | None, measure: str, least: float
) -> None:
    fight = duel(policy, rival, measure)
    found, case = Adversary(fight, 5, 30, 0).search(60)
    assert found.ratio > least
    assert found.ratio == found.own / found.other == fight.serve(lambda: sequences_of(case)).ratio


def test_no_request_of_a_trace_can_go() -> None:
    fight = duel("static", "dynamic")
    found, case = Adversary(fight, 5, 30, 1).search(60)
    for i in range(len(case.requests)):
        rest = dataclasses.replace(case, requests=case.requests[:i] + case.requests[i + 1 :])
        assert not rest.requests or fight.serve(lambda rest=rest: sequences_of(rest)).ratio < found.ratio  # type: ignore[misc]
    assert KEPT < 1


def test_a_policy_is_never_worse_than_itself() -> None:
    assert Adversary(duel("dynamic", "dynamic", "slowdown"), 4, 20, 0).search(20)[0].ratio == 1


def test_no_measure_is_below_the_bound() -> None:
    assert Adversary(duel("dynamic", None), 3, 5, 0).search(20)[0].ratio >= 1


@pytest.mark.parametrize("measure", MEASURES)
def test_run_serves_the_file_alike(measure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["adversary", "dynamic+priority", "--measure", measure]
    out = str(tmp_path / "worst.csv")
    found, told = run_command(capsys, *wanted, "--requests", "4", "--tries", "30", "--out", out)
    assert f"--trace {out}" in " ".join(told.split())
    assert f"{found['ratio']:.2f} times dynamic+fcfs" in told
    both = ["run", "dynamic+priority", "dynamic+fcfs", "--trace", out, "--max-batch-size", "2", "--no-plots"]
    run_command(capsys, *both, "--out", str(tmp_path / "runs"))
    rows = [*csv.DictReader((tmp_path / "runs/requests.csv").read_text().splitlines())]
    latencies = np.array([float(row["latency_s"]) for row in rows]).reshape(2, -1)
    ratio = np.divide(*MEASURES[measure](*latencies))
    assert ratio == pytest.approx(found["ratio"], abs=1e-3)


def test_a_trace_may_have_priorities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,priority\n0,9,9,1\n0,9,9,1\n0,9,2,0\n")
    told = ["run", "nobatch+priority", "--trace", str(path), "--out", str(tmp_path / "runs"), "--no-plots"]
    run_command(capsys, *told)
    latencies = [
        float(row["latency_s"]) for row in csv.DictReader((tmp_path / "runs/requests.csv").read_text().splitlines())
    ]
    assert latencies[2] == min(latencies)
    run_command(capsys, "run", "nobatch+priority", "--trace", str(path), "--priorities", "2", code=2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("dynamic", "--against bound"),
        ("dynamic --against bound --measure max", "--measure mean"),
        ("dynamic+sjf --replay FILE", "was removed in 0.2.0"),
        ("dynamic+sjf --out .", "adversary.csv"),
        ("dynamic+rpm --policy-option limit=1 --requests 9 --tries 9", "refuses"),
    ],
)
def test_what_has_no_meaning_is_refused(
    more: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, told = run_command(capsys, "adversary", *more.split(), code=2)
    assert words in " ".join(told.split())

"""A comparison served again: replayed exactly from its own steps, predicted by a cost model, and drawn."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import policies
from client import compare
from client.report import plots_requests, store
from client.report.album import Album
from costs import published
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import result
from simulate.__main__ import main
from simulate.measured import predict
from simulate.measured.observed import seen
from simulate.scenario import Chosen
from simulate.simulator import simulate


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a comparison of two policies, as a server whose steps take what oracle-a says would give it."""
    folder = tmp_path_factory.mktemp("comparison") / "x"
    flags = ["--num", "40", "--rate", "6", "--max-batch-size", "8", "--no-plots"]
    assert main(["run", "static", "dynamic", *flags, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "x")


def test_a_replay_of_a_runs_own_steps_is_the_run(folder: Path) -> None:
    told = predict.predict(folder)
    assert told["left_out"] == []
    for run in told["compared"]:
        assert run["requests"] == 40
        assert run["steps_alike"] == run["steps"] > 100
        assert run["simulated_p99_s"] == pytest.approx(run["p99_s"], abs=1e-5)
        assert run["mape"] < 1e-4
        assert "above the lower bound" in run["regret"]
    lines = store.read(folder).simulated
    assert len(lines) == 80
    assert all(float(x["ttft_s"]) == pytest.approx(float(x["simulated_ttft_s"]), abs=1e-5) for x in lines)


def test_open_ended_requests_grow_and_are_preempted_in_a_replay_as_in_the_run(tmp_path: Path) -> None:
    served = [Sequence([i] * 40, 344, id=f"r{i}", arrived_at=i / 2, open_ended=True) for i in range(12)]
    for i, seq in enumerate(served):
        seq.stop = lambda token, seq=seq, n=60 + 20 * i: "stop" if len(seq.output_ids) >= n else None
    scheduler = Scheduler(policies.get_policy("dynamic", 8), PagePool(25, 16), 64)
    run = simulate(scheduler, served, published.make("oracle-a"), records=True)
    assert sum(seq.preemptions for seq in served) > 0
    numbers = result.result(run, config={"max_batch_size": 8, "max_tokens_per_step": 64})
    numbers["server_after"]["engine"]["kv"] = {"pages_total": 24, "page_size": 16}
    folder = store.Store(tmp_path, {})
    result.keep(folder, "burst", 0, run, numbers)
    folder.close()
    (told,) = predict.predict(tmp_path)["compared"]
    assert told["requests"] == 12
    assert told["steps_alike"] == told["steps"] == run.steps
    assert told["mape"] < 1e-4


def test_a_prediction_by_a_cost_model_is_as_good_as_the_model(folder: Path) -> None:
    same = predict.predict(folder, "oracle-a")
    assert all(run["mape"] < 1e-4 for run in same["compared"])
    slow = predict.predict(folder, "ssjf")
    assert all(run["simulated_mean_s"] > 1.5 * run["mean_s"] for run in slow["compared"])
    assert json.loads((folder / "simulated.json").read_text())["cost"] == "ssjf"


@pytest.mark.full
def test_a_comparison_shows_which_clients_made_which_wait(tmp_path: Path) -> None:
    flags = ["--num", "30", "--rate", "8", "--max-batch-size", "4", "--clients", "2", "--no-plots"]
    assert main(["run", "dynamic", "nobatch", *flags, "--out", str(tmp_path / "x")]) == 0
    assert store.read(tmp_path / "x").blame("dynamic", "poisson:8") is None
    predict.predict(tmp_path / "x")
    results = store.read(tmp_path / "x")
    waits = {policy: np.mean(results.column(policy, "poisson:8", "queue_s")) for policy in results.policies}
    for policy, wait in waits.items():
        found = results.blame(policy, "poisson:8")
        assert found is not None
        mean = np.average(found["wait_ms"]["simulated"], weights=found["requests"])
        assert mean == pytest.approx(1000 * wait, rel=0.02)
    album = Album(results, [])
    plots_requests.blame(album, "poisson:8")
    drawn = (tmp_path / "x" / "plots" / "blame.poisson-8.svg").read_text()
    found = results.blame("dynamic", "poisson:8")
    assert found is not None
    for waits_by, runs_by in zip(found["wait_ms"]["by"], found["run_ms"]["by"]):
        assert all(f">{wait + run:,.0f}</text>" in drawn for wait, run in zip(waits_by, runs_by))


def test_another_order_of_steps_is_seen(folder: Path) -> None:
    results = store.read(folder)
    served = predict.served_of(results, results.of("dynamic", "poisson:6")[0])
    _, facts = predict.replay(replace(served, chosen=Chosen("nobatch")), published.make("oracle-a"))
    assert facts["steps_alike"] < 0.5 * facts["steps"]


def test_what_came_while_nobody_ran_is_seen_when_the_loop_wakes() -> None:
    arrived = [9.5, 11.5, 19.0, 21.5]  # it woke, it ran, it slept, it was too late
    assert seen(arrived, [(10.0, 11.0), (11.0, 12.0), (20.0, 21.0)]) == [10.0, 11.5, 20.0, 21.5]


def test_what_a_server_does_not_tell_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "runs" / "static.poisson-6.0.json"
    run = json.loads(path.read_text())
    path.write_text(json.dumps({**run, "server_after": None}))
    (folder / "iterations.jsonl").unlink()
    predict.main(str(folder))
    words = capsys.readouterr().err
    assert "static, poisson:6 left out: the server reports neither policy nor slots" in words
    assert "dynamic, poisson:6 left out: only 0 steps were reported, but a fit needs 30. Use --cost" in words
    with pytest.raises(SystemExit, match="nowhere"):
        predict.main(str(folder / "nowhere"))


def test_simulated_and_first_tokens_are_drawn_for_each_request(folder: Path) -> None:
    predict.predict(folder)
    album = Album(store.read(folder), [])
    for draw in (plots_requests.ttft_over_prompt, plots_requests.simulated_over_measured):
        draw(album, "poisson:6")
    assert [p.name for p in album.pictures] == ["ttft-over-prompt.poisson-6", "simulated-measured.poisson-6"]
    assert "n = 80 requests" in (folder / "plots" / "simulated-measured.poisson-6.svg").read_text()


def test_a_cost_file_that_is_not_there_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["static", "--cost", "none.json", "--out", str(tmp_path)], {}) == 2
    assert "./eb simulate calibrate --out FILE.json" in capsys.readouterr().err
    assert compare.check_cost("oracle-a") == "oracle-a"

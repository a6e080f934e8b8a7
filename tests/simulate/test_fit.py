"""Laws found from logs alone: of servers that are simulated, whose laws are known, and of two that others measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costs.cost import Affine, Host
from costs.steps import Step
from simulate.__main__ import main
from simulate.advise.search import Search, serve
from simulate.commands.fit import compare
from simulate.engines import known
from simulate.fitting.equations import Trajectory
from simulate.fitting.fit import fit
from simulate.fitting.fitted import Fitted, figures, load, save
from simulate.logs.checks import checked
from simulate.logs.log import Request
from simulate.logs.read import read
from simulate.scenario import Chosen, EngineSize
from simulate.simulator import simulate
from simulate.trace import Seen, Trace
from tests.support import ROOT
from tests.support.simulate import run_command

DENSE = Affine(base=0.02, decode=4e-5, prompt=1e-4, prefill=0.005, context=1e-7, pair=1e-8)
LAWS = {
    "dense": DENSE,
    "experts": Affine(base=0.005, decode=4e-5, prompt=1e-4, prefill=0.005, context=1e-7, experts=0.02, chosen=0.06),
    "knee": Affine(base=0.02, decode=4e-5, prompt=2e-5, prefill=0.005, context=1e-7, hinge=2e-4, knee=256),
}
SIZES = {"slots": 48, "tokens_per_step": 1024, "kv_tokens": 200_000, "prefix_cache": False}


def served(law: Affine = DENSE, count: int = 200, rate: float = 10.0, **settings: Any) -> list[Request]:
    """Return what a client of vLLM with this law would have logged."""
    rng = np.random.default_rng(3)
    at = np.cumsum(rng.exponential(1 / rate, count)) * np.where(np.arange(count) % 50 < 30, 0.6, 1.4)
    prompts = np.clip(rng.lognormal(5, 1, count), 8, 1500).astype(int)
    answers = np.clip(rng.lognormal(3.5, 0.8, count), 2, 200).astype(int)
    trace = Trace([Seen(float(t), int(p), int(a), None) for t, p, a in zip(np.sort(at), prompts, answers)])
    engine = EngineSize(**{**SIZES, **settings})
    run = simulate(engine.scheduler(Chosen("simulate.engines.vllm")), trace.sequences(), law, Host())
    return [
        Request(s.arrived_at, len(s.prompt_ids), len(s.output_ids), s.first_token_at or 0, s.finished_at or 0, s.id)
        for s in run.sequences
    ]


def fitted(requests: list[Request], engine: str = "vllm", **given: Any) -> Fitted:
    return fit(checked(requests), known.get(engine), {**SIZES, **given})


@pytest.fixture(scope="module")
def dense() -> Fitted:
    return fitted(served())


@pytest.mark.parametrize("name", ["dense", "experts", pytest.param("knee", marks=pytest.mark.full)])
def test_a_fit_finds_the_step_times_of_a_law(name: str, dense: Fitted) -> None:
    found = dense if name == "dense" else fitted(served(LAWS[name]))
    true = replace(found.scenario, cost=LAWS[name], host=Host())
    steps = Trajectory(found.log, true, found.log.last.max()).steps
    off = np.array([found.law.seconds(step) / LAWS[name].seconds(step) - 1 for step in steps])
    assert np.quantile(np.abs(off), 0.97) < 0.05
    assert abs(off.mean()) < 0.02
    assert not found.doubts


def test_exact_times_are_not_pulled_to_the_usual_law() -> None:
    law = Affine(base=0.022, decode=8e-6, prompt=1e-4, prefill=0.003, context=1.6e-7, pair=1e-8)
    found = fitted(served(law, rate=6.0)).law
    for rows in (1, 8, 32):
        step = Step(decodes=rows, context=rows * 200)
        assert found.seconds(step) == pytest.approx(law.seconds(step), rel=0.01), rows


def test_draws_of_the_law_agree_about_usual_steps_and_not_about_those_the_log_hardly_has(dense: Fitted) -> None:
    still = replace(dense.noise, residuals=(0.0,), drift=0.0)
    usual, rare = Step(decodes=6, context=1200), Step(decodes=1, context=200, prompt=1000, prefills=1, pairs=500_000)
    spread = [
        np.std([law.seconds(step) / dense.law.seconds(step) for law in still.laws(dense.law)]) for step in (usual, rare)
    ]
    assert 0 < spread[0] < 0.005
    assert spread[1] > 3 * spread[0]


def test_a_fit_is_kept_in_a_file_that_simulations_take(
    dense: Fitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    save(file, dense)
    again = load(file)
    for name in ("law", "kind", "sources", "misfit", "seen", "doubts"):
        assert getattr(again, name) == getattr(dense, name), name
    assert (again.noise.drift, again.noise.floors) == (dense.noise.drift, dense.noise.floors)
    for name in ("policies", "engine", "host"):
        assert getattr(again.scenario, name) == getattr(dense.scenario, name), name
    np.testing.assert_allclose(again.log.first, dense.log.first, atol=1e-6)
    told, _ = run_command(capsys, "run", "dynamic", "--num=20", "--cost", str(file))
    assert told["mean_ttft_ms"] > 20


def test_a_cost_file_without_requests_is_no_fit(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({"cost": {"kind": "affine", "base": 0.01}}))
    with pytest.raises(ValueError, match=r"\./eb fit"):
        load(tmp_path / "cost.json")


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        (served(count=1), "needs 3"),
        (served(count=2), "needs 3"),
        ([r._replace(output=1, last=r.first) for r in served(count=30)], "two tokens"),
        ([r._replace(first=math.nan) for r in served(count=30)], "streamed answers"),
    ],
    ids=["one", "two", "single tokens", "no first tokens"],
)
def test_a_log_from_which_no_law_follows_is_refused(requests: list[Request], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fitted(requests)


def test_few_requests_more_at_once_than_slots_and_another_scheduler_are_doubted() -> None:
    assert "3 requests" in " ".join(fitted(served(count=3)).doubts)
    assert "--slots" in fitted(served(count=40, rate=1e6), slots=30).doubts[0]
    requests = served(count=50, rate=40, slots=4)
    assert not fitted(requests, slots=4).doubts
    assert "--engine" in " ".join(fitted(requests, "tgi", slots=32).doubts)


def test_where_no_law_is_found_the_log_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simulate.fitting.fit.solve", lambda terms, *_: np.zeros(terms.shape[1]))
    log = saved(tmp_path / "log", served(count=40, rate=1e6), **SIZES, engine="vllm")
    assert main(["fit", log, "--slots=1", "--out", str(tmp_path / "cost.json")]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    assert "--slots" in line


@pytest.mark.parametrize("part", [0.0, 0.3], ids=["rows cost nothing", "rows cost"])
def test_where_each_step_had_one_row_the_gain_of_more_slots_is_held_whatever_rows_cost(part: float) -> None:
    pace = DENSE.base + DENSE.decode
    law = replace(DENSE, base=pace * (1 - part), decode=pace * part)
    log = served(law, count=120, rate=1, slots=1)
    for some in (log[:60], log[60:]):
        found = fitted(some, "llama.cpp", slots=1)
        _, low, high = Search(found, {}).advice({"slots": 2})["gains"]["mean latency"]
        one, two = (serve(found, change, law=law).latency.mean() for change in ({}, {"slots": 2}))
        assert low <= two / one - 1 <= high


def test_a_log_cut_out_of_a_busy_server_is_fitted_from_where_it_runs_alone() -> None:
    log = served(count=240, rate=30, slots=16)
    cut = fitted(log[120:], slots=16)
    assert any("busy" in note.text for note in cut.log.notes)
    found = cut.replay(cut.law)
    known = np.isfinite(cut.log.last)
    assert found.latency[known].mean() == pytest.approx((cut.log.last - cut.log.at)[known].mean(), rel=0.05)
    assert cut.law.base == pytest.approx(DENSE.base, rel=0.1)
    assert not any("busy" in note.text for note in checked(log).notes)


def test_slots_that_nobody_told_and_the_log_never_fills_are_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = saved(tmp_path / "log", served(count=40), engine="vllm")
    assert main(["fit", log, "--out", str(tmp_path / "cost.json")]) == 0
    assert "256 slots are a guess" in capsys.readouterr().err
    assert main(["fit", log, "--slots=48", "--out", str(tmp_path / "cost.json")]) == 0
    assert "are a guess" not in capsys.readouterr().err


def saved(file: Path, requests: list[Request], **server: Any) -> str:
    """Write a log as a probe writes it, and return its name."""
    lines = [{"server": server}, *(r._asdict() for r in requests)]
    file.write_text("\n".join(map(json.dumps, lines)).replace("NaN", "null"))
    return str(file)


def widths(found: Fitted, widening: float = 1.0) -> list[float]:
    noise = replace(found.noise, widened=found.noise.widened * widening)
    expected = found.replay(found.law)
    intervals = noise.intervals(found.replay, found.law, expected, figures, 5)
    return [high / low for low, high in intervals.values()]


def test_all_at_once_is_noted_and_its_intervals_are_wider() -> None:
    found = fitted(served(count=40, rate=1e6))
    assert "at once" in found.log.notes[0].text
    plain, wide = (np.array(widths(found, widening)) for widening in (1 / found.log.widening, 1))
    assert (wide > plain).all()


def test_the_command_reads_fits_and_predicts_what_it_did_not_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = saved(tmp_path / "log", served(count=40), **SIZES, engine="vllm")
    assert main(["fit", log, "--held-out=30", "--out", str(tmp_path / "cost.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sources"]["slots"] == "log"
    assert all(abs(each["error"]) < 0.1 for each in told["held_out"] if each["name"].startswith("mean"))
    assert load(tmp_path / "cost.json").law.base == told["cost"]["base"]


LIMITS = {"latency": 0.03, "TTFT": 0.05, "TPOT": 0.05}


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama-3.1-8b-rtx4090", "qwen3-32b-2xrtxpro6000"])
def test_the_first_half_of_a_run_of_others_predicts_its_second_half(name: str) -> None:
    log = read(ROOT / "docs" / "data" / name)
    half = len(log.at) // 2
    found = fit(log.until(half), known.get("vllm"))
    expected = compare(found, log, np.arange(len(log.at)) >= half)
    assert not found.doubts
    for kind, limit in LIMITS.items():
        assert np.mean([abs(each.error) for each in expected if each.name.endswith(kind)]) < limit

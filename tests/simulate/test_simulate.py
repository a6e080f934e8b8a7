"""The simulator's command line: what it prints, what it writes, and how it answers mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from client import compare
from client.report import store
from simulate.__main__ import COMMANDS, main
from tests.support import ROOT, points
from tests.support.mock_server import mock_server
from tests.support.simulate import run_command

SMALL = ["--num", "40", "--rate", "3"]


def test_a_run_is_told_and_written_like_a_measured_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "one"
    told, words = run_command(capsys, "run", "dynamic", *SMALL, "--out", str(out), "--e2el", "2", "--no-plots")
    summary = json.loads((out / "runs" / "dynamic.poisson-3.0.json").read_text())
    assert (summary["completed"], summary["policy"], summary["num_prompts"]) == (40, "dynamic", 40)
    assert sum(summary["simulation"]["waste"].values()) == pytest.approx(1)
    assert [len(gaps) + 1 for gaps in summary["itls"]] == summary["output_lens"]
    assert summary["mean_ttft_ms"] == pytest.approx(1000 * sum(summary["ttfts"]) / 40)
    assert told["mean_e2el_ms"] == summary["mean_e2el_ms"]
    assert "itls" not in told
    assert "steps in" in words
    assert all(time in words for time in ("TTFT", "TPOT", "E2E"))
    lines = (out / "iterations.jsonl").read_text().splitlines()
    assert len(lines) == summary["simulation"]["steps"]
    assert len((out / "requests.csv").read_text().splitlines()) == 41


@pytest.mark.parametrize("plots", [["--no-plots"], pytest.param([], marks=pytest.mark.full)], ids=["files", "plots"])
def test_the_folder_of_a_simulation_is_that_of_a_comparison(
    plots: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """File by file: what one has, the other has, with the same columns and keys."""
    with mock_server() as server:
        server.step = {"n": 1, "t": 0.0, "seconds": 0.1, "queue": 0, "members": []}
        flags = ["--workload", "fixed:8:4", "--numsamples", "12", "--load", "poisson:200", "--seed", "3"]
        assert compare.main([f"real={server.url}", *flags, *plots, "--out", str(tmp_path), "--name", "a"], {}) == 0
    simulated = ["run", "dynamic", "static", "--num", "12", "--rate", "3", "--out", str(tmp_path / "b"), *plots]
    run_command(capsys, *simulated)
    real, ours = store.read(tmp_path / "a"), store.read(tmp_path / "b")
    assert ours.policies == ["dynamic", "static"]
    assert real.summary.keys() == ours.summary.keys()
    assert set(real.runs[0]) <= set(ours.runs[0])
    assert set(real.whole(real.runs[0])) <= set(ours.whole(ours.runs[0]))
    assert real.requests[0].keys() == ours.requests[0].keys()
    assert {r["outcome"] for r in real.requests + ours.requests} == {"complete"}
    step = ours.iterations("static", "poisson:3")[0]
    assert set(real.iterations("real", "poisson:200")[0]) <= set(step)
    kinds, others = ({path.name for path in (tmp_path / name).iterdir()} for name in "ab")
    assert kinds == others
    if not plots:
        drawn = [{path.stem.partition(".")[0] for path in (tmp_path / n / "plots").iterdir()} for n in "ab"]
        assert drawn[0] <= drawn[1] >= {"slots", "waste", "ttft-over-prompt"}
    assert "holds results already" in run_command(capsys, *simulated, code=2)[1]


def test_records_change_nothing_and_two_runs_are_the_same_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["run", "static", "--max-batch-size", "4", "--kv-tokens", "4000", *SMALL]
    flags += ["--no-plots"]
    with_records, _ = run_command(capsys, *flags, "--out", str(tmp_path / "a"))
    without, _ = run_command(capsys, *flags, "--out", str(tmp_path / "b"), "--no-records")
    assert not (tmp_path / "b" / "iterations.jsonl").exists()
    assert (tmp_path / "a" / "requests.csv").read_bytes() == (tmp_path / "b" / "requests.csv").read_bytes()
    assert with_records["trace_sha256"] == without["trace_sha256"]
    for key in ("mean_ttft_ms", "p99_itl_ms", "mean_tpot_ms", "p99_e2el_ms", "duration"):
        assert with_records[key] == pytest.approx(without[key], rel=1e-12)


def test_several_policies_meet_the_same_arrivals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--no-plots", "--out", str(tmp_path)]
    told, words = run_command(capsys, "run", "dynamic", "static", "nobatch", *SMALL, *flags)
    assert [r["policy"] for r in told["runs"]] == ["dynamic", "static", "nobatch"]
    assert len({r["trace_sha256"] for r in told["runs"]}) == 1
    assert "| static |" in (tmp_path / "table.md").read_text()
    assert "the same arrivals" in words


def test_a_terminal_gets_no_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["run", "dynamic", "--num", "5"]) == 0
    assert capsys.readouterr().out == ""


def test_a_trace_and_options_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,4,3\n1,600,600\n2,5,2\n")
    flags = ["--trace", str(path), "--context", "1024", "--cost", "constant", "--cost-option", "a=1"]
    told, _ = run_command(capsys, "run", "window", *flags, "--policy-option", "delay=0.5", "--speed", "2")
    assert told["num_prompts"] == 2
    assert told["request_rate"] == 1.0  # of the two that fit, 2 s apart, at twice the speed
    assert told["mean_ttft_ms"] > 1500


def test_lines_of_a_trace_that_cannot_be_read_are_named_and_the_rest_is_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,4,3\nx,1,1\n0.1,5\n1,5,0\n2,5,2\n")
    told, words = run_command(capsys, "run", "dynamic", "--trace", str(path))
    assert told["num_prompts"] == 2
    assert all(said in words for said in ("3 of 5 lines", "line 3", "line 4", "line 5"))


def test_a_trace_may_have_prompts_as_texts_and_the_columns_of_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 7, "prompt": "' + "to be " * 16 + '", "num_tokens": 5}\n')
    told, words = run_command(capsys, "run", "dynamic", "--trace", str(path))
    assert told["total_input_tokens"] == 30
    assert "1 prompts of the trace are text" in words
    other = tmp_path / "other.csv"
    other.write_text("req_time,client,prompt_len,output_len\n3,a,40,5\n4,b,2,6\n")
    told, words = run_command(capsys, "run", "dynamic", "--trace", str(other))
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (42, 11)
    assert set(told["simulation"]["clients"]) == {"a", "b"}


def test_capacity_fleet_and_prefixes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    told, _ = run_command(capsys, "plan", "dynamic", "--num", "150", "--slots", "4", "16", "--limit", "p50:e2el:3")
    few, many = told["capacities"]
    assert few["rate"] < many["rate"]
    told, _ = run_command(
        capsys, "fleet", "static", "--replicas", "4", "--rate", "9", "--num", "80", "--router", "random"
    )
    assert told["routers"][0]["router"] == "random"
    told, _ = run_command(capsys, "prefix", "--train", "60", "--sizes", "0", "50", "--batches", "10", "--share", "0", "40",
                  "--kinds", "trie")  # fmt: skip
    assert told["share_40"][1]["hit_tokens"] > told["share_0"][1]["hit_tokens"]


# A command line and what its error names beside the remedy: the option or file, and the value or the bound.
@pytest.mark.parametrize(
    ("policy", "hint", "values"),
    points(
        2,
        ("dynamic+priority", "--priorities", ["3"]),
        ("dynamic+lpm", "--workload", ["shared-prefix:20:500", "--kv-tokens", "6400"]),
        ("dynamic+vtc", "--clients", ["3"]),
        ("dynamic+vtc-pred", "--clients", ["3"]),
        ("dynamic+drr", "--clients", ["3"]),
        ("dynamic+edf", "--slo", ["1", "20"]),
    ),
)
def test_an_order_without_anything_to_go_by_is_noted(
    policy: str, hint: str, values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the options that the note names, the order differs from arrival, and there is no note."""
    few = ["--num", "60", "--rate", "9", "--max-batch-size", "4"]
    plain, _ = run_command(capsys, "run", "dynamic", *few)
    blind, words = run_command(capsys, "run", policy, *few)
    assert f"note: {policy} " in words
    assert hint in words
    assert blind["mean_ttft_ms"] == plain["mean_ttft_ms"]
    sees, words = run_command(capsys, "run", policy, *few, hint, *values)
    assert "note:" not in words
    assert sees["mean_ttft_ms"] != plain["mean_ttft_ms"]


def test_prompts_that_share_a_beginning_are_found_in_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--num", "150", "--rate", "30", "--workload", "shared-prefix:20:300", "--cost", "affine"]
    without, _ = run_command(capsys, "run", "dynamic", *shared)
    arrival, _ = run_command(capsys, "run", "dynamic", *shared, "--kv-tokens", "6400")
    longest_hit, _ = run_command(capsys, "run", "dynamic+lpm", *shared, "--kv-tokens", "6400")
    assert arrival["mean_ttft_ms"] < without["mean_ttft_ms"]
    assert without["simulation"]["cached"] == 0 < arrival["simulation"]["cached"] < 1
    assert longest_hit["mean_ttft_ms"] != arrival["mean_ttft_ms"]


@pytest.mark.parametrize(
    "line",
    [
        "dynamic+edf --policy-option slo_per_token=1",
        "dynamic+sjf --policy-option predictor=mean",
        "dynamic+vtc --trace clients.csv",
        "dynamic+edf --slo 1 9",
        "dynamic",
    ],
)
def test_an_order_that_can_tell_the_requests_apart_is_not_noted(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{i},4,3,{'ab'[i % 2]}" for i in range(8))
    Path("clients.csv").write_text(f"arrival_s,prompt_tokens,output_tokens,client\n{rows}\n")
    more = [] if "--trace" in line else ["--num", "30"]
    assert "note:" not in run_command(capsys, "run", *line.split(), *more)[1]


def test_hints_leave_the_requests_as_they_were_and_show_what_orders_do(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num", "150", "--rate", "9", "--max-batch-size", "4"]
    plain, _ = run_command(capsys, "run", "dynamic", *few)
    flags = [*few, "--clients", "3", "--priorities", "2", "--slo", "1", "60"]
    told, _ = run_command(capsys, "run", "dynamic", "dynamic+vtc", "dynamic+edf", "dynamic+priority", *flags)
    fcfs, vtc, edf, _ = (run["simulation"] for run in told["runs"])
    assert told["runs"][0]["mean_ttft_ms"] == plain["mean_ttft_ms"]
    counts = [fcfs["clients"][f"client-{k}"]["requests"] for k in (1, 2, 3)]
    assert sum(counts) == 150
    assert counts == sorted(counts, reverse=True)
    assert vtc["clients"]["client-3"]["mean_ttft_ms"] < vtc["clients"]["client-1"]["mean_ttft_ms"]
    assert edf["deadlines_met"] > fcfs["deadlines_met"]


def test_a_plan_of_a_trace_is_for_the_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its lengths and its rate, times --speed; requests longer than --context are left out."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{0.5 * i},20,{10 if i % 2 else 900}\n" for i in range(121))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    flags = ["plan", "dynamic", "--max-batch-size", "8", "--trace", str(path)]
    told, _ = run_command(capsys, *flags)
    assert told["wanted"] == pytest.approx(2.0)
    short, words = run_command(capsys, *flags, "--context", "500", "--speed", "3")
    assert short["wanted"] == pytest.approx(3.0)
    assert "61 of 121" in words
    assert short["capacities"][0]["rate"] > 10 * told["capacities"][0]["rate"]
    other, _ = run_command(capsys, *flags, "--rate", "7")
    assert other["wanted"] == 7
    assert other["capacities"][0]["rate"] == told["capacities"][0]["rate"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"check"}))
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert COMMANDS[command] in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ran.stdout.split())


def test_the_simulator_loads_neither_torch_nor_flask() -> None:
    files = [*(ROOT / "simulate").glob("*.py"), *(ROOT / "simulate" / "commands").glob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert not {"torch", "flask", "gunicorn", "batching"} & loaded_by(*names)


def test_a_simulation_loads_nothing_that_sends_fits_or_draws() -> None:
    commands = ("simulate.__main__", "simulate.commands.run", "simulate.measured.what_if")
    assert not {"aiohttp", "requests", "scipy", "matplotlib"} & loaded_by(*commands)

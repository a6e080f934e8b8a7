"""The simulator's command line: what it prints, what it writes, and how it answers mistakes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mock_server import mock_server

from client import compare, store
from simulate.__main__ import COMMANDS, build_parser, main
from simulate.prefix import KINDS

ROOT = Path(__file__).parents[1]
SMALL = ["--num", "40", "--rate", "3"]


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[Any, str]:
    """Run a command; return the object on stdout's last line, and the words on stderr."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]) if captured.out else None, captured.err


def test_a_run_is_told_and_written_like_a_measured_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "one"
    told, words = run(capsys, "run", "dynamic", *SMALL, "--out", str(out), "--e2el", "2", "--no-plots")  # fmt: skip
    summary = json.loads((out / "runs" / "dynamic.poisson-3.0.json").read_text())
    keys = [
        "date",
        "backend",
        "model_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "errors",
        "seed",
        "trace_sha256",
        "policy",
        "config",
        "machine",
        "versions",
        "client_lag",
        "server_before",
        "server_after",
        "simulation",
    ]
    keys += [
        f"{s}_{m}_ms"
        for s in ("mean", "median", "std", "p50", "p90", "p99")
        for m in ("ttft", "tpot", "itl", "e2el")
    ]
    assert set(keys) <= set(summary)
    assert (summary["completed"], summary["policy"], summary["num_prompts"]) == (40, "dynamic", 40)
    assert sum(summary["simulation"]["waste"].values()) == pytest.approx(1)
    assert [len(gaps) + 1 for gaps in summary["itls"]] == summary["output_lens"]
    assert summary["mean_ttft_ms"] == pytest.approx(1000 * sum(summary["ttfts"]) / 40)
    assert told["mean_e2el_ms"] == summary["mean_e2el_ms"]
    assert "itls" not in told
    assert "steps in" in words
    lines = (out / "iterations.jsonl").read_text().splitlines()
    assert len(lines) == summary["simulation"]["steps"]
    assert len((out / "requests.csv").read_text().splitlines()) == 41


def test_the_folder_of_a_simulation_is_that_of_a_comparison(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """File by file: what one has, the other has, with the same columns and keys."""
    with mock_server() as server:
        server.step = {"n": 1, "t": 0.0, "seconds": 0.1, "queue": 0, "members": []}
        flags = [
            "--workload",
            "fixed:8:4",
            "--numsamples",
            "12",
            "--load",
            "poisson:200",
            "--seed",
            "3",
        ]
        assert (
            compare.main([f"real={server.url}", *flags, "--out", str(tmp_path), "--name", "a"], {})
            == 0
        )
    simulated = [
        "run",
        "dynamic",
        "static",
        "--num",
        "12",
        "--rate",
        "3",
        "--out",
        str(tmp_path / "b"),
    ]
    run(capsys, *simulated)
    real, ours = store.read(tmp_path / "a"), store.read(tmp_path / "b")
    assert ours.policies == ["dynamic", "static"]
    assert real.summary.keys() == ours.summary.keys()
    assert set(real.runs[0]) <= set(ours.runs[0])
    assert set(real.whole(real.runs[0])) <= set(ours.whole(ours.runs[0]))
    assert real.requests[0].keys() == ours.requests[0].keys()
    assert {r["outcome"] for r in real.requests + ours.requests} == {"complete"}
    step = ours.iterations("static", "poisson:3")[0]
    assert set(real.iterations("real", "poisson:200")[0]) <= set(step)
    kinds = {path.name for path in (tmp_path / "a").iterdir() if path.name[:8] != "arrivals"}
    assert kinds == {path.name for path in (tmp_path / "b").iterdir()}
    plots = [
        {path.stem.partition(".")[0] for path in (tmp_path / n / "plots").iterdir()} for n in "ab"
    ]
    assert plots[0] <= plots[1] >= {"slots", "waste", "ttft-over-prompt", "batch-sizes"}
    assert "holds results already" in run(capsys, *simulated, code=2)[1]


def test_records_change_nothing_and_two_runs_are_the_same_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["run", "static", "--max-batch-size", "4", "--kv-tokens", "4000", *SMALL]
    flags += ["--no-plots"]
    with_records, _ = run(capsys, *flags, "--out", str(tmp_path / "a"))
    without, _ = run(capsys, *flags, "--out", str(tmp_path / "b"), "--no-records")
    assert not (tmp_path / "b" / "iterations.jsonl").exists()
    assert (tmp_path / "a" / "requests.csv").read_bytes() == (
        tmp_path / "b" / "requests.csv"
    ).read_bytes()
    assert with_records["trace_sha256"] == without["trace_sha256"]
    for key in ("mean_ttft_ms", "p99_itl_ms", "mean_tpot_ms", "p99_e2el_ms", "duration"):
        assert with_records[key] == pytest.approx(without[key], rel=1e-12)


def test_several_policies_meet_the_same_arrivals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--no-plots", "--out", str(tmp_path)]
    told, words = run(capsys, "run", "dynamic", "static", "nobatch", *SMALL, *flags)
    assert [r["policy"] for r in told["runs"]] == ["dynamic", "static", "nobatch"]
    assert len({r["trace_sha256"] for r in told["runs"]}) == 1
    assert "| static |" in (tmp_path / "table.md").read_text()
    assert "the same arrivals" in words


def test_a_trace_and_options_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,4,3\n1,600,600\n2,5,2\n")
    flags = [
        "--trace",
        str(path),
        "--context",
        "1024",
        "--cost",
        "constant",
        "--cost-option",
        "a=1",
    ]
    told, _ = run(capsys, "run", "window", *flags, "--policy-option", "delay=0.5", "--speed", "2")
    assert told["num_prompts"] == 2
    assert told["request_rate"] == "inf"
    assert told["mean_ttft_ms"] > 1500


def test_lines_of_a_trace_that_cannot_be_read_are_named_and_the_rest_is_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,4,3\nx,1,1\n0.1,5\n2,5,2\n")
    told, words = run(capsys, "run", "dynamic", "--trace", str(path))
    assert told["num_prompts"] == 2
    assert "note: 2 of 4 lines left out: line 3: could not convert string to float: 'x'; line 4" in words  # fmt: skip
    path.write_text("at,tokens\n0,4\n")
    assert "Use arrival_s,prompt_tokens,output_tokens" in run(capsys, "run", "dynamic", "--trace", str(path), code=2)[1]  # fmt: skip


def test_capacity_fleet_and_prefixes_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "a.png"
    told, _ = run(capsys, "plan", "dynamic", "--num", "300", "--slots", "4", "16", "--limit", "p50:e2el:3",
                  "--shortest-queue", "8", "--out", str(picture))  # fmt: skip
    few, many = told["capacities"]
    assert few["rate"] < many["rate"]
    assert picture.stat().st_size > 1000
    told, _ = run(
        capsys,
        "fleet",
        "static",
        "--replicas",
        "4",
        "--rate",
        "9",
        "--num",
        "80",
        "--router",
        "random",
    )
    assert told["routers"][0]["router"] == "random"
    told, _ = run(capsys, "prefix", "--train", "60", "--sizes", "0", "50", "--batches", "10", "--share", "0", "40",
                  "--kinds", "trie")  # fmt: skip
    assert told["share_40"][1]["hit_tokens"] > told["share_0"][1]["hit_tokens"]


def test_the_prefix_experiment_is_drawn_with_the_figures_beside_each_plot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": [1, 2, n % 3]}) + "\n" for n in range(12)))
    told, words = run(capsys, "prefix", "--train", "60", "--sizes", "0", "640", "--batches", "10",
                      "--trace", str(trace), "--out", str(tmp_path / "x"))  # fmt: skip
    drawn = {path.stem for path in (tmp_path / "x").glob("*.svg")}
    assert {
        "prefix-hits",
        "prefix-ttft",
        "prefix-tpot",
        "prefix-batch-ttft",
        "prefix-trace",
    } <= drawn
    assert all((tmp_path / "x" / f"{name}.png").stat().st_size > 1000 for name in drawn)
    with (tmp_path / "x" / "prefix-hits.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {(line["shared"], line["kind"]) for line in lines} == {
        (share, kind) for share in ("0", "200") for kind in KINDS
    }
    assert json.loads((tmp_path / "x" / "prefix.json").read_text()) == told
    assert f"written: {tmp_path / 'x'}" in words


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rum"], "unknown command 'rum'. Did you mean 'run'? Use one of: run,"),
        (["run", "dinamic"], "Did you mean 'dynamic'?"),
        (["run", "dynamic", "--rat", "3"], "Did you mean --rate?"),
        (["run", "dynamic", "--cost", "lm-mock"], "Did you mean 'llm-mock'?"),
        (["run", "dynamic", "--workload", "orka"], "Did you mean 'orca'?"),
        (["run", "dynamic", "--rate", "0"], "must be positive. Use --rate 2"),
        (["run", "dynamic", "--policy-option", "x"], "must be name=value. Use --policy-option x=1"),
        (["run", "dynamic", "--cost-option", "a=b"], "must be a number. Use a=0.01"),
        (["run", "dynamic", "--kv-tokens", "64"], "Raise --kv-tokens"),
        (["plan", "dynamic", "--limit", "p99:tft:1"], "as in p99:ttft:1"),
        (["fleet", "dynamic", "--router", "randm"], "Did you mean 'random'?"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    _, err = run(capsys, *argv, code=2)
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"check"}))
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(command).parse_args(["--help"])
    assert COMMANDS[command] in " ".join(capsys.readouterr().out.split())


def test_the_simulator_loads_neither_torch_nor_flask() -> None:
    code = "import simulate.__main__, simulate.check, simulate.mock, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not {"torch", "flask", "gunicorn", "batching"} & set(loaded.stdout.split())

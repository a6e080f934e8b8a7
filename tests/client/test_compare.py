"""The comparison as a command: the same arrivals for all, everything kept, and a verdict on two runs."""

import csv
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from client import compare, experiment, sweep
from client.report import store, summary
from client.report.measure import Outcome
from client.send import servers
from client.send.servers import ServerFailed, free_port, started
from tests.support import ROOT
from tests.support.mock_server import MockServer, mock_server

pytestmark = pytest.mark.usefixtures("quick_figures")
SMALL = ["--workload", "fixed:8:4", "--numsamples", "12", "--load", "poisson:200", "burst", "--seed", "3"]


@pytest.fixture
def pair() -> Iterator[tuple[MockServer, MockServer]]:
    with mock_server() as one, mock_server() as two:
        yield one, two


def compared(pair: tuple[MockServer, MockServer], out: Path, *flags: str) -> tuple[int, Path]:
    urls = [f"quick={pair[0].url}", f"slow={pair[1].url}"]
    code = compare.main([*urls, *SMALL, "--out", str(out), "--name", "x", "--no-plots", *flags], {})
    return code, out / "x"


def test_two_servers_get_the_same_requests_and_all_results_are_written(
    pair: tuple[MockServer, MockServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = pair
    one.step = {"n": 1, "t": 0.0, "queue": 0, "members": []}
    code, folder = compared(pair, tmp_path)
    out, err = capsys.readouterr()
    assert code == 0
    assert out.splitlines()[-1] == str(folder)
    assert sorted(map(json.dumps, one.asked)) == sorted(map(json.dumps, two.asked))
    results = store.read(folder)
    assert results.policies == ["quick", "slow"]
    assert results.loads == ["poisson:200", "burst"]
    assert len(results.requests) == 4 * 12
    assert {r["outcome"] for r in results.requests} == {"complete"}
    assert len({run["trace_sha256"] for run in results.runs if run["load"] == "burst"}) == 1
    assert all(run["warmup_requests"] == 3 for run in results.runs)
    assert len(list((folder / "runs").iterdir())) == 4
    for load in results.loads:  # the steps of a server are copied with the run that they belong to
        steps = results.iterations("quick", load)
        assert len(steps) == 12
        assert steps[0] == {"policy": "quick", "load": load, "repeat": 0, **one.step}
    assert results.iterations("slow", "burst") == []
    for shown in ("[1/2] quick", "| quick |", "| slow |", "burst: ", "seed 3"):
        assert shown in err
    assert (folder / "table.md").read_text().startswith("poisson:200: 12 requests of fixed:8:4")


def test_it_says_before_and_during_the_runs_how_long_they_take(
    pair: tuple[MockServer, MockServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(pair, tmp_path)
    words = " ".join(capsys.readouterr().err.split())
    assert "4 runs of at least 0 s" in words
    ends = r"12 requests; these loads end in about \d+ (s|min)"
    assert len(re.findall(ends, words)) == 3  # in all but the first run
    args = compare.read(["a=http://a:1", "--load", "burst", "constant:2", "--out", str(tmp_path), "--name", "y"], {})
    known = experiment.Experiment(args, Console(quiet=True), "")
    known._took["burst"] = 30.0
    plans = [compare.plans_of(args, pace, 0)[0] for pace in args.load]
    assert known.seconds([*plans, plans[0]]) == 2 * 30.0 + 99 / 2
    known.store.close()


def test_a_server_is_named_by_its_address_or_its_port(server: MockServer, tmp_path: Path) -> None:
    flags = [*SMALL, "--out", str(tmp_path), "--name", "x", "--no-plots", "--port", str(server.port)]
    assert compare.main([f"127.0.0.1:{server.port}", *flags], {}) == 0
    assert store.read(tmp_path / "x").policies == [f"127.0.0.1:{server.port}", f"localhost:{server.port}"]


def test_an_unreachable_server_is_reported_and_the_others_are_compared(
    pair: tuple[MockServer, MockServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"gone=http://127.0.0.1:{free_port()}"
    code, folder = compared(pair, tmp_path, gone)
    assert code == 1
    results = store.read(folder)
    assert results.policies == ["quick", "slow"]
    assert any("gone" in text for text in results.summary["warnings"])
    assert "error: gone" in capsys.readouterr().err
    assert compare.main([gone, *SMALL, "--out", str(tmp_path), "--name", "y"], {}) == 3


def test_failed_requests_are_warned_about_above_the_figures(
    pair: tuple[MockServer, MockServer], tmp_path: Path
) -> None:
    pair[0].cut_after = 2
    code, folder = compared(pair, tmp_path)
    assert code == 1
    assert any("12 failed: stream cut" in w for w in store.read(folder).summary["warnings"])


def test_repeats_have_consecutive_seeds_and_give_intervals(pair: tuple[MockServer, MockServer], tmp_path: Path) -> None:
    pair[1].ttft = 0.3  # far enough from the other on a busy machine, too
    for attempt in "123":  # a pause of the machine may fall on the quick one
        _, folder = compared(pair, tmp_path / attempt, "--repeats", "3", "--no-stream")
        results = store.read(folder)
        best = summary.best(results, "burst", "mean_e2el_ms", "low")
        if best == "quick":
            break
    runs = results.of("quick", "burst")
    assert [run["seed"] for run in runs] == [6, 7, 8]  # those before are of the first load
    assert len({run["trace_sha256"] for run in runs}) == 3
    assert summary.spread(runs, "output_throughput") is not None
    assert runs[0]["mean_ttft_ms"] is None
    assert best == "quick"


def headline(runs: list[dict[str, Any]], **more: Any) -> str:
    return summary.headline(store.Results(Path(), {"runs": runs, **more}, []))


def burst(**rates: list[float]) -> str:
    """Return the headline of bursts with these tokens per second, run by run."""
    return headline([
        {"policy": policy, "load": "burst", "repeat": i, "output_throughput": rate}
        for policy, each in rates.items() for i, rate in enumerate(each)
    ])  # fmt: skip


def test_runs_that_hardly_differ_are_not_told_apart() -> None:
    text = burst(static=[96.0], dynamic=[100.0], nobatch=[10.0])
    pair = "dynamic (100 tokens/s) and static (96 tokens/s) are not distinguishable with one run"
    assert f"{pair}; nobatch 10 tokens/s" in text
    assert "one run each" in text
    assert "dynamic has the most" in burst(static=[94.0], dynamic=[100.0])
    assert "a has the most" in burst(a=[101.8, 102.0, 102.2], b=[98.8, 99.0, 99.2])  # by their intervals
    overlapping = burst(a=[90.0, 130.0, 100.0], b=[80.0, 120.0, 95.0])
    assert "not distinguishable" in overlapping
    assert "--repeats" not in overlapping


OPEN = {"load": "poisson:8", "repeat": 0, "output_throughput": 1.0}


def test_the_headline_of_an_open_load_is_about_latency_and_who_cannot_keep_up() -> None:
    spans = {"a": [400.0, 600.0], "b": [550.0, 700.0], "c": [2000.0, 3000.0]}
    text = headline([
        OPEN | {"policy": policy, "mean_e2el_ms": sum(span) / 2, "intervals": {"mean_e2el_ms": span}}
        for policy, span in spans.items()
    ])  # fmt: skip
    assert "a (0.50 s) and b (0.62 s) are not distinguishable with one run; c 2.50 s (5.0 times as long)" in text
    runs = [
        OPEN | {"policy": policy, "mean_e2el_ms": 8000 / rate, "request_rate": 8.0, "request_throughput": rate}
        for policy, rate in {"a": 7.9, "b": 3.0, "c": 7.5}.items()
    ]
    assert "b cannot keep up" in headline(runs)
    assert "2.67" not in headline(runs)  # it is not compared by its latency
    assert "b cannot keep up" in headline(runs[1:2])


def test_the_highest_throughput_of_a_sweep_says_where_it_still_rises() -> None:
    rates = {"flat": (100, 190, 195), "rising": (100, 190, 380), "full": (100, 190, 380)}
    runs = [
        {"policy": policy, "load": f"users:{4**i}", "output_throughput": rate, "completed": 9}
        for policy, each in rates.items()
        for i, rate in enumerate(each)
    ]
    flat, rising, full = headline(runs, sweep={"over": "users", "saturation": {"full": 16}}).split(",")
    assert ["rising" in part.partition("users")[2] for part in (flat, rising, full)] == [False, True, False]


@pytest.mark.parametrize(
    ("main", "line", "words"),
    [
        (compare.main, "a b --goodput ttft:9 --no-stream", "use e2el:MS"),
        (compare.main, "static static", "twice"),
        (compare.main, "--original", "Use docs/results/comparison.md"),
        (sweep.main, "localhost:9 --port 9", "twice"),
        (compare.main, "a:9 http://a:9/v1", "twice"),
        (compare.main, "dynamic --load poison:3", "Did you mean 'poisson'"),
        (compare.main, "dynamic --workload orka", "Did you mean 'orca'"),
        (compare.main, "x=http://u:p@h dynamic", "is not a server address"),
        (compare.main, "one.json", "Use A.json B.json"),
        (compare.main, "nothing.json none.json", "nothing.json"),
        (compare.main, "ours=http://a:8500 other=http://", "'http://' is not a server address"),
        (sweep.main, "ours=http://a:8500 other=http://", "'http://' is not a server address"),
        (compare.main, "dynamic edf", "'edf' is an order"),
        (compare.main, "a=http://127.0.0.1:1 dinamic", "Did you mean 'dynamic'"),
        (sweep.main, "static dinamic", "Did you mean 'dynamic'"),
        (compare.main, "'dynamic --prefix-cache off --max-batch-size 5000'", "--max-batch-size is '5000'"),
        *((sweep.main, flags, "") for flags in ("--over speed", "--load burst", "--repeats 3", "--values 0")),
        (sweep.main, "--over batch", "--over batch was removed in 0.2.0. Use "),
        (sweep.main, "--over speculate", "--over speculate was removed in 0.2.0. Use "),
        (sweep.main, "--users 2", "--users was removed in 0.2.0. Use "),
    ],
)
def test_usage_errors_end_with_2_and_a_remedy_before_anything_is_written(
    main: Callable[..., int], line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shlex.split(line), "--out", str(tmp_path)], {}) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_the_flags_of_a_policy_win_over_those_of_all_servers() -> None:
    words = servers._program("dynamic --speculate auto", "--speculate", "off")
    assert words[2:] == ["dynamic", "--speculate", "off", "--speculate", "auto"]


def test_a_trace_is_replayed_at_its_own_times(pair: tuple[MockServer, MockServer], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,9,2\n0.2,9,2\nbad\n")
    flags = ["--workload", f"trace:{trace}:2", "--out", str(tmp_path), "--name", "t", "--no-plots"]
    assert compare.main([f"a={pair[0].url}", *flags], {}) == 0
    requests = store.read(tmp_path / "t").requests
    assert sorted(float(r["arrival_s"]) for r in requests) == [0, 0.1]


def test_the_written_command_has_no_key() -> None:
    shown = experiment.without_key("compare", ["x", "--api-key", "s3 cret", "--api-key=s3 cret"])
    assert shown == "./eb compare x --api-key KEY --api-key=KEY"


@pytest.mark.parametrize(
    ("main", "flags", "shown"),
    [
        (sweep.main, "--over users --values 1 4", "seeds 1 to 2: other prompts for each value"),
        (compare.main, "--load constant:200 burst", "burst: 12 requests of fixed:32:2, bard, seed 2"),
    ],
)
def test_no_run_finds_prompts_that_its_server_has_had_before(
    main: Callable[..., int], flags: str, shown: str, pair: tuple[MockServer, MockServer], tmp_path: Path
) -> None:
    asked = ["--workload", "fixed:32:2", "--numsamples", "12", "--seed", "1", *flags.split()]
    assert main([f"a={pair[0].url}", *asked, "--out", str(tmp_path), "--name", "x", "--no-plots"], {}) == 0
    prompts = [body["prompt"] for body in pair[0].asked]
    assert len({prompt[:40] for prompt in prompts}) == len(prompts) == 3 + 2 * 12
    assert shown in (tmp_path / "x" / "table.md").read_text()
    if main is sweep.main:
        assert [run["value"] for run in store.read(tmp_path / "x").runs] == [1, 4]


def test_a_server_is_saturated_by_a_rate_it_cannot_serve_or_users_without_gain() -> None:
    def at(rate: float, served: float) -> dict[str, Any]:
        return {"request_rate": rate, "request_throughput": served, "output_throughput": served}

    growing = [0.1 * i for i in range(20)]
    assert sweep.saturated("rate", [at(8, 5)], growing)
    assert not sweep.saturated("rate", [at(8, 7.9)], growing)
    assert not sweep.saturated("rate", [at(8, 5)], [1.0] * 20)
    last = {"program_times": [{"began_s": 10.0, "alone_s": 20.0}], "request_rate": 1.0, "request_throughput": 5.0}
    assert [sweep.saturated("rate", [last | {"duration": s}], [1.0] * 20) for s in (40.0, 70.0)] == [False, True]
    assert sweep.saturated("rate", [at(8, 3)], [1.0] * 20)
    assert sweep.saturated("users", [at(0, 5), at(0, 5.1), at(0, 5.2)], [])
    assert not sweep.saturated("users", [at(0, 5), at(0, 9), at(0, 9.1)], [])


def test_a_server_that_does_not_start_is_reported_with_its_own_message(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ServerFailed, match="dinamic"), started("dinamic", [], log):
        pass


@pytest.mark.process
def test_a_real_server_is_started_compared_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["dynamic", "--model", "mock:llm-mock@20", *SMALL, "--load-format", "auto", "--out", str(tmp_path)]
    assert compare.main([*given, "--name", "real", "--no-plots"], {}) == 0, capsys.readouterr().err
    results = store.read(tmp_path / "real")
    assert results.runs[0]["completed"] == 12
    assert results.runs[0]["model_id"] == "mock:llm-mock@20"
    assert results.iterations("dynamic", "burst")
    assert sum(results.runs[1]["slot_steps"].values()) > 0


APP = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ready).serve_forever()
"""
STARTER = """
import pathlib, time
from client.send import servers
servers.APP = pathlib.Path("app.py").absolute()
with servers.started("static", [], pathlib.Path("log")) as (url, _):
    print(url, flush=True)
    time.sleep(60)
"""


def test_a_terminated_comparison_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    command = [sys.executable, "-c", STARTER]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        port = int(run.stdout.readline().rpartition(":")[2])
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_requests_are_written_the_moment_they_end(tmp_path: Path) -> None:
    folder = store.Store(tmp_path / "x", {"seed": 1})
    folder.record({"policy": "p", "load": "burst", "repeat": 0})(Outcome(0, 5, 0.0, 0.001, 1.0, tokens=5))
    with (tmp_path / "x" / "requests.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["policy"], row["asked_tokens"], row["latency_s"]) == ("p", "5", "1.000000")
    folder.close()
    assert not (tmp_path / "x" / "iterations.jsonl").exists()

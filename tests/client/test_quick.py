"""The quick comparison: a burst, and then a rate that fits the capacity it showed."""

from __future__ import annotations

from pathlib import Path

import pytest

from client import compare
from client.report import store
from client.send.servers import free_port
from tests.support.mock_server import mock_server

SMALL = ["--quick", "--workload", "fixed:8:4", "--numsamples", "12", "--seed", "3", "--no-plots"]


pytestmark = pytest.mark.usefixtures("quick_figures")


def test_quick_and_full_are_what_the_help_says() -> None:
    quick, full = compare.read(["--quick"], {}), compare.read([], {})
    assert (quick.model, quick.numsamples, quick.what) == ("bard", 58, ["nobatch", "static", "dynamic"])
    assert ([pace.text for pace in quick.load], quick.repeats, quick.is_rate_measured) == (["burst"], 3, True)
    assert (full.repeats, full.is_rate_measured) == (1, False)
    again = compare.read(["--quick", "--load", "burst", "poisson:37.1", "--repeats", "2"], {})
    assert ([pace.text for pace in again.load], again.repeats) == (["burst", "poisson:37.1"], 2)
    assert not again.is_rate_measured
    assert (full.model, full.load_format, full.numsamples) == ("gpt2-medium", "dummy", 100)
    assert compare.read(["--model", "smollm2"], {}).load_format == "auto"  # not random weights, whose chats never end
    assert [pace.text for pace in full.load] == ["poisson:1", "burst"]
    assert compare.read(["--quick", "--numsamples", "7"], {}).numsamples == 7


def test_it_sends_the_burst_and_then_a_rate_below_the_capacity_that_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock_server() as one, mock_server() as two:
        two.ttft = 0.8  # far enough from the other on a busy machine, too
        what = [f"fast={one.url}", f"slow={two.url}"]
        gone = f"gone=http://127.0.0.1:{free_port()}"
        assert compare.main([*what, gone, *SMALL, "--out", str(tmp_path), "--name", "x"], {}) == 1
        said = capsys.readouterr().err
        results = store.read(tmp_path / "x")
        two.ttft = 0.0
        assert compare.main([*what, *SMALL, "--load", *results.loads, "--out", str(tmp_path), "--name", "y"], {}) == 0
    capacity = results.summary["capacity"]
    rates = [run["request_throughput"] for run in results.of("fast", "burst")]
    assert (capacity["policy"], capacity["requests_per_second"]) == ("fast", pytest.approx(sum(rates) / 3))
    assert float(capacity["load"].partition(":")[2]) == pytest.approx(0.7 * sum(rates) / 3, rel=0.01)
    assert results.loads == results.summary["loads"] == ["burst", capacity["load"]]
    assert (results.lightest, results.heaviest) == (capacity["load"], "burst")
    assert len(results.runs) == 2 * 2 * 3
    assert said.count("error: gone") == 1
    assert f"--seed 3 --load burst {capacity['load']}" in " ".join(said.split())
    table = (tmp_path / "x" / "table.md").read_text()
    assert table.startswith("burst: ")
    assert f"{capacity['load']} (70% of the capacity of fast): 12 requests of fixed:8:4, 3 times" in table
    again = store.read(tmp_path / "y").runs  # the printed flags repeat the run
    assert {run["trace_sha256"] for run in again} == {run["trace_sha256"] for run in results.runs}


def test_nothing_completed_means_no_rate(tmp_path: Path) -> None:
    with mock_server() as broken:
        broken.cut_after = 2
        flags = [f"a={broken.url}", *SMALL, "--out", str(tmp_path), "--name", "x"]
        assert compare.main(flags, {}) == 1
    results = store.read(tmp_path / "x")
    assert results.loads == ["burst"]
    assert "capacity" not in results.summary

"""The verdict on two runs: is their difference more than chance?"""

import json
from pathlib import Path
from typing import Any

import pytest

from client import compare
from client.report import figures, verdict


def run_of(latencies: list[float], **more: Any) -> dict[str, Any]:
    return {"trace_sha256": "t", "e2els": latencies, "output_lens": [10] * len(latencies), **more}


def test_equal_runs_are_not_distinguishable_and_slower_ones_are() -> None:
    base = [1.0 + 0.3 * (i % 7) for i in range(60)]
    noise = [0.01 * ((i * 37) % 11 - 5) for i in range(60)]
    a, b = run_of(base), run_of([x + n for x, n in zip(base, noise)])
    lines = {line.measure: line for line in verdict.compare(a, b)}
    assert lines["mean_e2el_ms"].verdict == verdict.SAME
    slower = run_of([x + 0.2 + n for x, n in zip(base, noise)], output_throughput=5.0)
    lines = {line.measure: line for line in verdict.compare(a, slower)}
    # Paired by request, 0.2 s is seen through a spread of 0.6 s.
    assert lines["mean_e2el_ms"].verdict.startswith("B is slower")
    assert lines["mean_e2el_ms"].difference == pytest.approx(200, abs=5)
    assert lines["mean_normalized_latency_ms"].difference == pytest.approx(20, abs=0.5)
    assert lines["output_throughput"].verdict == "no interval from one run each"
    assert "mean_ttft_ms" not in lines


def test_gaps_of_streams_are_pooled_and_tpot_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_RESAMPLES", 100)
    streams = {"ttfts": [0.2] * 12, "itls": [[0.1] * 9] * 12}
    a = run_of([1.1] * 12, **streams)
    b = run_of([1.1] * 12, **{**streams, "itls": [[0.2] * 9] * 12})
    lines = {line.measure: line for line in verdict.compare(a, b)}
    assert lines["p99_itl_ms"].difference == pytest.approx(100)
    assert lines["mean_tpot_ms"].a == pytest.approx(100)


def test_different_arrivals_are_rejected_without_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path in paths:
        path.write_text(json.dumps({**run_of([1.0] * 12), "trace_sha256": path.stem}))
    files = [*map(str, paths)]
    assert compare.main(files) == 2
    assert "different arrivals" in capsys.readouterr().err
    assert compare.main([*files, "--different"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said[0]["verdict"] == verdict.SAME

"""benchmarks/gpu.sh runs without a GPU, at still smaller sizes, and reports errors."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_peers, gpu_steps
from generate.gpu.runner import GpuRunner
from generate.runner import ModelRunner
from tests.support.checkpoints import write_checkpoint
from tests.support.generate import SHAPES, make_model

SMALL = ["--batch", "1,3", "--context", "40", "--prefill", "16", "--prompts", "4", "--tokens", "5",
         "--burst", "3", "--seconds", "0.01", "--dtype", "float32", "--device", "cpu"]  # fmt: skip


def measure(tmp_path: Path, sections: str, *argv: str) -> dict:
    model = write_checkpoint(tmp_path / "model", layers=1)
    path = tmp_path / "result.json"
    gpu.main(["--model", str(model), "--sections", sections, "--json", str(path), *SMALL, *argv])
    return json.loads(path.read_text())


@pytest.mark.full
def test_it_checks_and_measures_without_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="Triton is not there: pip install triton")
    result = measure(tmp_path, "checks,decode,prefill")
    found = result["checks"]
    assert found["attention"]["kernel"] == "triton"
    assert found["attention"]["error"] < 1e-5
    assert found["attention"]["same_bits_alone"]
    assert found["fast"]["equal_to_cpu_float32"] == found["fast"]["equal_alone_and_in_a_batch"] == 4
    assert found["fast"]["logprob_error"] < 1e-3
    assert [(r["batch"], r["context"]) for r in result["decode"]] == [(1, 40), (3, 40)]
    assert all(r["step_ms"] > 0 and r["fraction"] > 0 for r in result["decode"])
    assert result["prefill"][0]["tokens"] == 16
    printed = capfd.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == result
    assert "no GPU: these figures show only that the code runs" in printed.err


def test_a_section_that_would_begin_too_late_is_skipped(tmp_path: Path) -> None:
    assert measure(tmp_path, "prefill", "--minutes", "-1")["prefill"] is None
    with pytest.raises(SystemExit, match=r"unknown section decoding\. Use decode, prefill"):
        gpu.main(["--sections", "decoding"])


def test_a_section_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_steps, "measure_decode", broken)
    with pytest.raises(SystemExit, match="decode: RuntimeError: no such kernel"):
        measure(tmp_path, "decode,prefill")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["decode"] is None
    assert result["prefill"][0]["tokens"] == 16


def test_a_section_that_is_cut_off_or_fails_keeps_its_results() -> None:
    written: list[list[int]] = []
    failed: list[str] = []

    def slow(keep: gpu.Keep) -> list[int]:
        keep([1])
        try:
            signal.pause()
        except Exception:  # as a peer's failure is
            return [3]
        return [2]

    def broken(keep: gpu.Keep) -> None:
        keep([4])
        raise ValueError("no room")

    gpu.attempt("peers", slow, written.append, 0.05, failed)
    gpu.attempt("decode", broken, written.append, 60, failed)
    assert written == [[1], [4]]
    assert failed == ["peers: TimeIsUp: the minutes are over", "decode: ValueError: no room"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.full
def test_decoding_up_to_the_last_position_of_the_context_is_measured(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", layers=1)
    context = json.loads((model / "config.json").read_text())["n_positions"]
    result = measure(tmp_path, "decode", "--batch", "2", "--context", str(context))
    assert result["failed"] == []
    assert [row["context"] for row in result["decode"]] == [context]


def test_a_difference_is_a_near_tie_only_if_the_errors_of_numbers_explain_it() -> None:
    model = make_model(SHAPES["heads of 64"])
    prompt = [3, 1, 4]
    logits = model(torch.tensor([prompt]))[0][0, -1]
    first, second, *_, last = logits.argsort(descending=True).tolist()
    pairs = [(prompt, [first, 9], [second, 8]), (prompt, [first, 9], [last, 9])]
    near, far = gpu_checks._gaps(ModelRunner(model, 4, 64), pairs)
    assert near == pytest.approx(float(logits[first] - logits[second]), abs=1e-5)
    assert far == pytest.approx(float(logits[first] - logits[last]), abs=1e-5)
    assert 0 <= near < far


def test_all_requested_tokens_are_generated_for_a_peers_figure() -> None:
    sizes = gpu.Sizes("x", [1], [8], [8], prompts=1, tokens=6, burst=5, seconds=0.1)
    asked = gpu_peers.requests(301, sizes)
    assert asked == gpu_peers.requests(301, sizes)
    assert len(asked) == 5
    assert all(8 <= len(ids) <= 64 and 1 <= tokens <= 12 for ids, tokens in asked)
    runner = GpuRunner(make_model(SHAPES["heads of 64"]), 40, 64, capacity=5)
    assert gpu_peers.ours(runner, asked) > 0


@pytest.mark.full
@pytest.mark.process
def test_it_measures_serving_and_transformers(tmp_path: Path) -> None:
    result = measure(tmp_path, "serving,peers", "--policies", "dynamic")
    assert result["serving"]["http"]["dynamic"]["burst"] > 0
    assert result["serving"]["offline"]["dynamic"] > 0
    assert len(result["peers"]) == 3
    assert all(isinstance(rate, float) for rate in result["peers"].values()), result["peers"]

"""The benchmarks that are started on machines of others run as commands, at small sizes and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.checkpoints import write_checkpoint
from tests.support.servers import clean_environment

pytestmark = [pytest.mark.full, pytest.mark.process]


def measure(module: str, folder: Path, *argv: str) -> dict[str, Any]:
    model, result = write_checkpoint(folder / "model", layers=1), folder / "result.json"
    command = [sys.executable, "-m", f"dev.benchmarks.{module}", "--model", str(model), "--json", str(result), *argv]
    environment = clean_environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


def test_the_gpus_benchmark_checks_and_measures_all_of_its_sections(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not there: pip install triton")
    result = measure("gpu", tmp_path, "--batch", "1,3", "--context", "40,1024", "--prefill", "16", "--prompts", "4",
                     "--tokens", "5", "--burst", "3", "--steady", "9", "--slots", "2", "--seconds", "0.01",
                     "--peer", "vllm=/none@float32", "--dtype", "float32", "--device", "cpu",
                     "--sections", "checks,decode,prefill,serving,peers", "--policies", "dynamic")  # fmt: skip
    found = result["checks"]
    assert found["attention"]["kernel"] == "triton"
    assert found["attention"]["same_bits_alone"]
    assert found["fast"]["equal_to_cpu_float32"] == found["fast"]["equal_alone_and_in_a_batch"] == 4
    assert [(r["batch"], r["context"]) for r in result["decode"]] == [(b, c) for c in (40, 1024) for b in (1, 3)]
    assert result["prefill"][0]["tokens"] == 16
    assert all(row["sampled_step_ms"] > 0 for row in result["decode"] if row["context"] == 40)
    steady, burst = result["serving"]["steady"], result["serving"]["burst dynamic"]
    assert (steady["requests"], steady["slots"], burst["requests"], burst["slots"]) == (9, 2, 3, 3)
    for found in (steady, burst):
        assert min(found["engine"], found["http"], found["host_ms"]) > 0
        assert 0 < found["used_ahead"] <= found["decode_steps"] <= found["steps"]
    assert result["peers"].pop("vllm float32").startswith("there is no program /none")
    assert len(result["peers"]) == 4
    assert all(isinstance(rate, float) for rate in result["peers"].values()), result["peers"]


def test_the_benchmark_of_quality_compares_formats_by_text_and_layer(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(
        "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
    )
    result = measure("quality", tmp_path, "--text", f"{tmp_path}/text", "--threads", "1", "--prompts", "6", "--tokens", "8",
                     "--stride", "50", "--formats", "float32", "bfloat16", "--bounds")  # fmt: skip
    exact, rounded = result["formats"]
    assert (exact["equal_texts"], exact["equal_tokens"], exact["worst_error"]) == (6, 1, 0)
    assert (exact["against"], rounded["change"]) == ("bfloat16", 0)
    assert 1e-4 < rounded["worst_error"] < 0.02

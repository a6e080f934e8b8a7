"""`python -m benchmarks.quality`: its figures against plain ones, and what it says of formats and bounds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.quality import __main__ as quality
from benchmarks.quality import figures, formats, layers
from generate.cpu.linear import Linear
from models import weights
from models.sources import catalog
from tests.support import points
from tests.support.checkpoints import write_checkpoint

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", context=128)
    (folder / "judged.txt").write_text(TEXT)
    return str(folder)


def judge(folder: str, *more: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Return exit code and result of the command."""
    file = Path(folder) / "result.json"
    command = ["quality", "--model", folder, "--text", f"{folder}/judged.txt", "--json", str(file), "--threads", "1",
               "--prompts", "6", "--tokens", "8", "--stride", "50", *more]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        quality.main()
    return int(ended.value.code or 0), json.loads(file.read_text())


def test_bits_per_byte_are_those_of_the_plain_model(folder: str) -> None:
    engine = formats.load("float32", folder, threads=1)
    ids = engine.tokenizer.encode(TEXT)
    n_bytes, window, stride = len(TEXT.encode()), 100, 30
    bits = figures.bits_per_byte(formats.runner_of(engine), ids, [], n_bytes, window, stride)
    model = weights.load_gpt(catalog.resolve(folder))
    nats = 0.0
    for i in range(1, len(ids)):  # each token from the window in which it is judged
        end = window if i < window else min(window + stride * ((i - window) // stride + 1), len(ids))
        with torch.no_grad():
            logits = model(torch.tensor([ids[max(0, end - window) : i]]))[0][0, -1]
        nats += F.cross_entropy(logits, torch.tensor(ids[i])).item()
    assert bits == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-4)


def test_two_formats_are_compared_by_text_and_layer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, result = judge(folder, "--formats", "float32", "bfloat16", "--bounds", monkeypatch=monkeypatch)
    exact, rounded = result["formats"]
    assert code == 0
    assert (exact["equal_texts"], exact["equal_tokens"], exact["worst_error"]) == (6, 1, 0)
    assert (exact["against"], rounded["change"]) == ("bfloat16", 0)
    assert 1e-4 < rounded["worst_error"] < 0.02


def test_a_damaged_layer_is_named(folder: str) -> None:
    exact = layers.record(formats.runner_of(formats.load("float32", folder, threads=1)), list(range(40)))  # type: ignore[arg-type]
    runner: Any = formats.runner_of(formats.load("float32", folder, threads=1))
    assert len(exact) == 2 * 4 + 1
    assert exact["head"].y.shape == (40, runner.config.vocab_size)
    weight = torch.zeros(runner.config.n_embd, runner.config.n_embd * 4)
    runner.blocks.blocks[1].mlp_proj = Linear(weight, None)
    assert layers.worst(runner, exact) == layers.Worst("1 mlp_proj", 1.0)


@pytest.mark.parametrize(("worse", "code"), points(2, (0.002, 0), (0.004, 1), (math.nan, 1)))
def test_a_format_beyond_its_bound_fails_the_command(
    worse: float, code: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = iter((2.0, 2.0 * (1 + worse)))
    monkeypatch.setattr(figures, "bits_per_byte", lambda *args: next(bits))
    monkeypatch.setattr(formats, "bound", lambda name: formats.BOUNDS["int8-kv"] if name == "float32" else None)
    ended, result = judge(folder, "--formats", "bfloat16", "float32", "--bounds", monkeypatch=monkeypatch)
    assert ended == code
    assert result["formats"][1]["within"] == (not code)


def test_bounds_of_formats_that_are_joined_add_up() -> None:
    assert formats.bound("int8+int8-kv") == pytest.approx(0.008)
    assert formats.bound("bfloat16") is None


@pytest.mark.parametrize("name", ["int7", "float32+bfloat16", ""])
def test_what_is_no_format_is_refused_before_a_model_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", "--model", "/nowhere", "--formats", "bfloat16", name])
    with pytest.raises(SystemExit) as ended:
        quality.main()
    assert "bfloat16" in str(ended.value.code)


def test_a_format_that_cannot_run_is_refused_with_those_that_can(folder: str) -> None:
    with pytest.raises(formats.FormatError) as error:
        formats.load_or_name_others("float16", folder, "auto", "cpu", 1)  # which is for GPUs
    assert all(name in str(error.value) for name in ("float16", "float32", "bfloat16"))


def test_texts_agree_until_their_first_difference() -> None:
    agreed = figures.agreement([[1, 2, 3, 4], [1, 9, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert agreed == figures.Agreement(5 / 8, 1)

"""A start on a GPU with too little memory, or kernels that fail, and what banner, /info and doctor say of it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from api.dialects import tgi
from api.service import Service
from app import create_app
from config import DEVICE_ERROR, Config, ConfigError
from generate import machine
from generate.gpu import card
from generate.gpu.runner import GpuRunner
from launch import banner, doctor, load_model
from terminal.progress import Stages
from tests.support.checkpoints import write_checkpoint
from tests.support.fakes import fake_engine
from tests.support.generate import SHAPES, make_model

FALLBACK = "decode attention falls back to plain PyTorch, which is much slower: no compiler"


@pytest.mark.parametrize(
    ("failures", "asked"),
    [(0, [(64, 1.0)]), (1, [(64, 1.0), (64, 0.5)]), (3, [(64, 1.0), (64, 0.5), (64, 0.25), (16, 0.25)])],
)
def test_a_start_without_memory_takes_fewer_pages_and_then_fewer_rows(
    failures: int, asked: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, float]] = []

    def load(config: Config, slots: int, share: float, loading: Stages) -> str:
        tried.append((slots, share))
        if len(tried) <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "parts"

    monkeypatch.setattr(load_model, "_load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_model.load_model(Config(), 64) == "parts"  # type: ignore[comparison-overlap]
    assert tried == asked


@pytest.mark.parametrize("has_card", [True, False])
def test_memory_that_never_suffices_ends_the_start_with_the_numbers(
    has_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def load(config: Config, slots: int, share: float, loading: Stages) -> None:
        tried.append(share)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore advice")

    monkeypatch.setattr(load_model, "_load", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_card)
    expected = machine.MachineError if has_card else torch.OutOfMemoryError
    with pytest.raises(expected, match=r"2\.00 GiB"):
        load_model.load_model(Config(), 64)
    assert len(tried) == (len(load_model.SMALLER) if has_card else 1)


def test_parts_name_what_fell_back_and_what_was_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make = load_model.make_runner

    def warn(*how: Any) -> Any:
        logging.getLogger("generate.gpu.choose").warning("%s", FALLBACK)
        return make(*how)

    monkeypatch.setattr(load_model, "make_runner", warn)
    monkeypatch.setattr(card, "DRIVER", tmp_path)
    monkeypatch.setenv(DEVICE_ERROR, "CUDA error: an illegal memory access was encountered")
    parts = load_model._load(Config(model=str(write_checkpoint(tmp_path / "tiny"))), 2, 0.001, Stages("loading"))
    assert parts.facts["fallbacks"] == [FALLBACK]
    said = "\n".join(parts.facts["warnings"])
    for words in ("there is an NVIDIA driver, but torch", "The CPU computes instead", "keys and values get 0% of their share",
                  "the engine before failed: CUDA error: an illegal memory access"):  # fmt: skip
        assert words in said, words


def test_the_banner_and_info_name_each_part_and_why_one_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"kernels": {"decode": "torch", "prompts": "triton"}, "fallbacks": [FALLBACK]}
    engine = dataclasses.replace(fake_engine(), facts=facts)
    banner.show(Config(), engine, 1.0)
    app = create_app(Config(), engine)
    service: Service = app.extensions["service"]
    info = tgi.information(service, engine)
    engine.manager.stop()
    assert f"decode torch, prompts triton; SLOWER: {FALLBACK}" in capsys.readouterr().err
    assert (info["kernels"], info["kernel_fallbacks"]) == (facts["kernels"], [FALLBACK])


def test_the_doctor_shows_the_card_as_its_driver_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._gpu(Config()) == "no NVIDIA driver"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA X, 580.1, 100 MiB, 200 MiB, 9.0'\n")
    tool.chmod(0o755)
    assert doctor._gpu(Config()) == "NVIDIA X, 580.1, 100 MiB, 200 MiB, 9.0"
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    with pytest.raises(ConfigError, match=r"mismatch\. Install or restart the driver"):
        doctor._gpu(Config())


def test_the_doctor_measures_one_request_and_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = load_model.warm_up
    # 100 tokens in Triton's interpreter take half a minute.
    monkeypatch.setattr(load_model, "warm_up", lambda model, requests, tokens: warm_up(model, requests, 3))
    runner = GpuRunner(make_model(SHAPES["heads of 64"]), 9, 128, capacity=8)
    facts = {"kernels": runner.kernels, "fallbacks": [], "warnings": []}
    parts = SimpleNamespace(model=runner, model_name="tiny", facts=facts)
    asked: list[Config] = []
    monkeypatch.setattr(load_model, "load_model", lambda config, slots: (asked.append(config), parts)[1])
    monkeypatch.setattr(machine, "choose_device", lambda wanted: torch.device("cuda"))
    text = doctor._device(Config(max_batch_size=8))
    assert "layers torch, drawing torch, decode steps launched, prompt steps launched; tokens/s of tiny: " in text
    assert text.endswith(" with 8 requests")
    assert (asked[0].load_format, asked[0].model) == ("dummy", "gpt2-medium")
    facts["fallbacks"] = [FALLBACK]
    assert f"; SLOWER: {FALLBACK}; tokens/s" in doctor._device(Config(max_batch_size=2))

"""What the machine computes with: number formats and threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generate import cores, machine
from models.sources import catalog

CARD = torch.device("cuda")


@pytest.mark.parametrize(
    ("trained", "has_bfloat16", "chosen"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float16),
        ("float16", True, torch.float16),
        ("float32", True, torch.float16),
        (None, True, torch.float16),
    ],
)
def test_a_gpu_computes_in_the_format_of_the_model_if_it_can(
    trained: str | None, has_bfloat16: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bfloat16)
    assert machine.choose_dtype("auto", CARD, trained) == chosen
    assert machine.choose_dtype("float32", CARD, trained) == torch.float32


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": 16}, None),
        ({}, None),
    ],
)
def test_a_config_names_the_format_of_its_model(config: dict[str, object], trained: str | None) -> None:
    resolved = catalog.resolve("bard")
    assert replace(resolved, config=config).trained_dtype == trained


@pytest.mark.parametrize(
    ("flags", "processor", "compiler", "faster"),
    [
        ("avx2 fma avx512_bf16", "x86_64", False, True),
        ("asimd bf16", "aarch64", False, True),
        ("avx2 fma", "x86_64", True, True),
        ("asimd", "aarch64", True, True),
        ("avx2 fma", "x86_64", False, False),
        ("avx avx512bf16x", "x86_64", True, False),
        (None, "arm64", True, True),
        (None, "x86_64", True, False),
    ],
)
def test_a_cpu_takes_bfloat16_where_it_or_our_kernels_compute_it_faster(
    flags: str | None, processor: str, compiler: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path) -> str:
        if flags is None:
            raise FileNotFoundError(path)
        return f"model name\t: any\nflags\t\t: fpu {flags}\n"

    monkeypatch.delenv("EB_KERNELS", raising=False)
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setenv("CC", "true" if compiler else "no-such-compiler")
    assert machine.bfloat16_is_faster() is faster
    assert machine.choose_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if faster else torch.float32)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 8),
        (None, 8),
    ],
)
def test_there_are_as_many_threads_as_cores_that_a_container_may_use(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit + "\n")
    monkeypatch.setattr(cores, "CPU_LIMIT", file)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(8)))
    assert cores.cores.__wrapped__() == expected

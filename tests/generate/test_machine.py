"""What the machine computes with: number formats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generate import machine
from models import catalog

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

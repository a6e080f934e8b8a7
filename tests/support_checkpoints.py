"""Small checkpoints that transformers made, for tests that load them."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch

TINY = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 48, "vocab_size": 211}


def transformers() -> Any:
    """Import the library, which takes seconds, when a test needs it; its warnings meanwhile are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformers")


def reference(**changes: Any) -> Any:
    """Return a GPT2LMHeadModel of random tensors: none can be left out unnoticed."""
    torch.manual_seed(3)
    config = transformers().GPT2Config(**{**TINY, "eos_token_id": None, "bos_token_id": None, **changes})
    hf = transformers().GPT2LMHeadModel(config)
    for name, parameter in hf.named_parameters():
        parameter.data.normal_(std=0.15)
        if ".ln_" in name and name.endswith("weight"):
            parameter.data += 1
    return hf.eval()


def save(folder: Path, hf: Any, **options: Any) -> Path:
    hf.save_pretrained(folder, **options)
    return folder

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


def reference_of(model_type: str, **changes: Any) -> Any:
    """Return a small model of the Llama kind, of random tensors; its config has no token that ends a text."""
    torch.manual_seed(3)
    shape = {
        "vocab_size": 211, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 160,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if model_type == "mistral":
        shape["sliding_window"] = None
    if model_type == "qwen2":
        del shape["head_dim"]
    auto = transformers()
    hf = auto.AutoModelForCausalLM.from_config(auto.AutoConfig.for_model(model_type, **{**shape, **changes}))
    for name, parameter in hf.named_parameters():
        # A tied head of large numbers would repeat the last token for ever.
        parameter.data.normal_(std=0.03 if "embed" in name and hf.config.tie_word_embeddings else 0.15)
        if "norm" in name:
            parameter.data += 1
    return hf.eval()


@torch.no_grad()
def judged(hf: Any, prompt: list[int], answer: list[int]) -> list[tuple[int, float]]:
    """Return for each token of an answer what transformers chooses after the tokens before it, and by what lead.

    An answer equals all choices exactly where it is the greedy answer of transformers, which would need a step a token.
    """
    logits = hf(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]  # (tokens, vocabulary)
    best = logits.topk(2)
    leads = (best.values[:, 0] - best.values[:, 1]).tolist()
    return list(zip(best.indices[:, 0].tolist(), leads))

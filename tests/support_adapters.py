"""Small LoRA adapters in PEFT's format, written by hand, and models with them merged, which are the reference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LLAMA = tuple(f"self_attn.{x}_proj" for x in "qkvo") + ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def targets_of(hf: Any) -> tuple[str, ...]:
    """Return the names of the linear layers of a block of a transformers model."""
    return GPT2 if hf.config.model_type == "gpt2" else LLAMA


def write_adapter(
    folder: Path, hf: Any, rank: int = 4, seed: int = 0, targets: tuple[str, ...] = (), size: float = 1.0, **config: Any
) -> Path:
    """Write an adapter of random numbers for transformers' model `hf`, at all of its linear layers or at `targets`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in hf.named_modules():
        if not name.endswith(targets or targets_of(hf)):
            continue
        out, into = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.shape[::-1]
        r = config.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(r, into, generator=generator) / into**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, r, generator=generator) / r**0.5 * size
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    last = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "lora_dropout": 0.1,
                "bias": "none", "target_modules": last, "fan_in_fan_out": hf.config.model_type == "gpt2"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


@torch.no_grad()
def merged(hf: Any, folder: Path) -> Any:
    """Return a copy of `hf` with the adapter in its weights: W + s B A, added in float64."""
    model, config = copy.deepcopy(hf), json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        a = stored.get(f"base_model.model.{name}.lora_A.weight")
        if a is None:
            continue
        b = stored[f"base_model.model.{name}.lora_B.weight"]
        alpha = config.get("alpha_pattern", {}).get(name.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        change = scale * b.double() @ a.double()
        change = change if isinstance(module, torch.nn.Linear) else change.T
        module.weight.copy_((module.weight.double() + change).to(module.weight.dtype))
    return model

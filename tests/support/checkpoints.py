"""Small checkpoints: a GPT-2 written by hand, models that transformers made, LoRA adapters and models with them merged."""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import numpy as safetensors_numpy
from safetensors.torch import load_file, save_file

from tests.support.fakes import EOT

MERGES = ["t h", "th e", "o u", "r o"]
CONTEXT = 1024
TINY = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 48, "vocab_size": 211}


def byte_alphabet() -> list[str]:
    """Return GPT-2's 256 printable stand-ins for the bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def write_checkpoint(folder: Path, context: int = CONTEXT, layers: int = 2) -> Path:
    """Write a random GPT2LMHeadModel, 128 wide, whose text is varied, with a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*byte_alphabet(), *(m.replace(" ", "") for m in MERGES), EOT]
    width, vocabulary = 128, len(tokens)
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": context,
        "n_embd": width, "n_layer": layers, "n_head": 2, "vocab_size": vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n")
    rng = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.12, shape).astype(np.float32)

    tensors = {"transformer.wte.weight": weight(vocabulary, width)}
    tensors["transformer.wpe.weight"] = weight(context, width)
    linear = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    norms = [f"h.{i}.{name}" for i in range(layers) for name in ("ln_1", "ln_2")] + ["ln_f"]
    for norm in norms:
        tensors[f"transformer.{norm}.weight"] = 1 + weight(width)
        tensors[f"transformer.{norm}.bias"] = weight(width)
    for i in range(layers):
        for name, (rows, columns) in linear.items():
            key = f"transformer.h.{i}.{name}"
            tensors[f"{key}.weight"] = weight(rows * width, columns * width)
            tensors[f"{key}.bias"] = weight(columns * width)
    safetensors_numpy.save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


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
    return randomized(transformers().AutoConfig.for_model(model_type, **{**shape, **changes}))


def randomized(config: Any) -> Any:
    """Return the model of this configuration with random tensors."""
    hf = transformers().AutoModelForCausalLM.from_config(config)
    for name, parameter in hf.named_parameters():
        # A tied head of large numbers would repeat the last token for ever.
        parameter.data.normal_(std=0.03 if "embed" in name and hf.config.tie_word_embeddings else 0.15)
        if "norm" in name or ".ln_" in name:
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


def targets_of(hf: Any) -> tuple[str, ...]:
    """Return the names of the linear layers of a block of a transformers model."""
    if hf.config.model_type == "gpt2":
        return ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


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

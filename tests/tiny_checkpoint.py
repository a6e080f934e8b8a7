"""A tiny checkpoint with random weights, for tests of what a model computes and of servers that load one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support import EOT

MERGES = ["t h", "th e", "o u", "r o"]
CONTEXT = 1024


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
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder

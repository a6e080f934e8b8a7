"""A checkpoint with linear layers in int8 or int4, as the library compressed-tensors stores it, which vLLM reads.

In int8, weights have a scale per channel, and inputs are rounded per token while the model runs. In int4, weights have a
scale per group of inputs, and inputs stay as they are. The head and the embedding stay as they are in both. It must not
know a single peer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import families, tensors
from models.sources import checkpoint

LINEAR = ("qkv", "attn_proj", "fc", "mlp_proj")
GROUP = 32  # inputs that share a scale in int4, as in llama.cpp's Q4_0
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True}
INT8 = {
    "weights": {**EIGHT_BITS, "strategy": "channel", "dynamic": False},
    "input_activations": {**EIGHT_BITS, "strategy": "token", "dynamic": True},
}
INT4 = {"weights": {**FOUR_BITS, "strategy": "group", "group_size": GROUP, "dynamic": False}}
SCHEMES = {"int8": ("int-quantized", INT8), "int4": ("pack-quantized", INT4)}


def write(source: Path, folder: Path, kind: str) -> Path:
    """Write the checkpoint in `source` with linear layers in int8 or int4 into `folder`, unless it is there; return it.

    ValueError where int4 does not fit a layer.
    """
    file = folder / "model.safetensors"
    if file.is_file():  # it comes last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".txt", ".jinja") and not path.name.startswith("model."):
            shutil.copyfile(path, folder / path.name)
    config = checkpoint.read_config(source)
    name, group = SCHEMES[kind]
    scheme = {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}, indent=1))
    part = folder / "model.part"
    save_file(dict(_rounded(source, config, kind)), str(part), metadata={"format": "pt"})
    part.replace(file)
    return folder


def _rounded(source: Path, config: dict[str, Any], kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor, and what stands for a linear layer's weight."""
    layout = families.family_of(config).layout
    pieces = tensors.pieces(checkpoint.architecture_of(config, source), layout)
    for path in checkpoint.weight_files(source):
        for name, values in load_file(str(path)).items():
            piece = pieces.get(layout.plain_name(name) or "")
            if piece is None or piece.place.part not in LINEAR or piece.place.leaf != "weight":
                yield name, values
            elif kind == "int8":
                yield from _in_eight_bits(name, values, piece.transposed)
            elif piece.transposed or values.shape[1] % GROUP:
                raise ValueError(
                    f"{name} has the shape {tuple(values.shape)}, but int4 needs (out, in) and groups of {GROUP}"
                )
            else:
                yield from _in_four_bits(name, values)


def _in_eight_bits(name: str, values: Tensor, transposed: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer as whole numbers (in the checkpoint's layout) and scales (out, 1)."""
    weight = (values.T if transposed else values).float()
    scale = (weight.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12).to(torch.bfloat16)  # as it is stored
    rounded = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    yield name, (rounded.T if transposed else rounded).contiguous()
    yield f"{name}_scale", scale


def _in_four_bits(name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a layer as int32 of eight whole numbers each, (out, in / 8), and scales (out, groups)."""
    weight = values.float().view(len(values), -1, GROUP)
    scale = (weight.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-12).to(torch.bfloat16)
    rounded = (weight / scale.float()).round().clamp(-8, 7).to(torch.int64) + 8
    shifts = torch.arange(0, 32, 4)
    yield f"{name}_packed", (rounded.view(len(values), -1, 8) << shifts).sum(-1).to(torch.int32)
    yield f"{name}_scale", scale.squeeze(-1).contiguous()
    yield f"{name}_shape", torch.tensor(values.shape)

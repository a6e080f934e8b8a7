"""A checkpoint with linear layers in int8, as the library compressed-tensors stores it, which vLLM reads.

Weights have a scale per channel; inputs are rounded per token while the model runs. The head and the embedding stay as
they are. It must not know a single peer.
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
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


def write(source: Path, folder: Path) -> Path:
    """Write the checkpoint in `source` with rounded linear layers into `folder`, unless it is there, and return it."""
    file = folder / "model.safetensors"
    if file.is_file():  # it comes last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".txt", ".jinja") and not path.name.startswith("model."):
            shutil.copyfile(path, folder / path.name)
    config = checkpoint.read_config(source)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}, indent=1))
    part = folder / "model.part"
    save_file(dict(_rounded(source, config)), str(part), metadata={"format": "pt"})
    part.replace(file)
    return folder


def _rounded(source: Path, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor, and a linear layer as whole numbers (in the checkpoint's layout) and scales (out, 1)."""
    layout = families.family_of(config).layout
    pieces = tensors.pieces(checkpoint.architecture_of(config, source), layout)
    for path in checkpoint.weight_files(source):
        for name, values in load_file(str(path)).items():
            piece = pieces.get(layout.plain_name(name) or "")
            if piece is None or piece.place.part not in LINEAR or piece.place.leaf != "weight":
                yield name, values
                continue
            weight = (values.T if piece.transposed else values).float()
            scale = (weight.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12).to(torch.bfloat16)  # as it is stored
            rounded = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
            yield name, (rounded.T if piece.transposed else rounded).contiguous()
            yield f"{name.removesuffix('.weight')}.weight_scale", scale

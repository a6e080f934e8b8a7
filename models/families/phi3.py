"""Phi-3 and Phi-4: Llama with fused projections, longrope, heads that may rotate in part (Abdin et al., 2024)."""

from dataclasses import replace

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.families.mistral import WINDOWED, windows
from models.family import FUSED, GGUF, Config, Family

PARTS = {"qkv": ("self_attn.qkv_proj",), "fc": ("mlp.gate_up_proj",)}


def read(config: Config) -> Architecture:
    """Read a Phi3Config."""
    config.assume(rms_norm_eps=1e-5)
    shape = sizes(config, rotates="part")
    window = windows(config, shape, range(shape["n_layer"]), used=config.raw.get("sliding_window") is not None)
    return Architecture(family="phi3", **shape, **window)


FORM = GGUF("phi3", "phi3", FUSED, {**WINDOWED, "partial_rotary_factor": "rope.dimension_count"})
FAMILY = Family(("phi3",), read, replace(LAYOUT, parts={**LAYOUT.parts, **PARTS}), (FORM,))

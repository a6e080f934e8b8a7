"""Phi-3 and Phi-4 without a window: Llama with fused projections, longrope, heads that may rotate in part (Abdin et al., 2024)."""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture
from models.families.llama import LAYOUT, refuse_window, sizes
from models.family import Config, Family

FUSED = {"qkv": ("self_attn.qkv_proj",), "fc": ("mlp.gate_up_proj",)}


def read(config: Config) -> Architecture:
    """Read a Phi3Config."""
    config.assume(rms_norm_eps=1e-5)
    shape = sizes(config, rotates="part")
    refuse_window(config.take("sliding_window"), shape["block_size"])
    return Architecture(family="phi3", **shape)


FAMILY = Family(("phi3",), read, replace(LAYOUT, parts={**LAYOUT.parts, **FUSED}))

"""OLMo 2: Llama with norms behind attention and MLP, and over all queries and keys (OLMo team, 2025)."""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.family import Config, Family

NORMS = {"norm_1": ("post_attention_layernorm",), "norm_2": ("post_feedforward_layernorm",)}


def read(config: Config) -> Architecture:
    """Read an Olmo2Config."""
    config = Config({"rms_norm_eps": 1e-5, **config.raw})
    biases = config.flag("attention_bias", False)
    architecture = Architecture(
        family="olmo2", norm_after=True, qk_norm=True, whole_qk_norm=True, qkv_bias=biases, proj_bias=biases,
        **sizes(config),
    )  # fmt: skip
    config.refuse_rest()
    return architecture


FAMILY = Family(("olmo2",), read, replace(LAYOUT, parts={**LAYOUT.parts, **NORMS}))

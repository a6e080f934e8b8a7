"""Qwen2 and Qwen2.5: Llama with biases at queries, keys and values (Yang et al., 2024)."""

from __future__ import annotations

from models.architecture import Architecture
from models.families.llama import LAYOUT, refuse_window, sizes
from models.family import Config, ConfigError, Family


def read(config: Config) -> Architecture:
    """Read a Qwen2Config."""
    shape = sizes(config) | {"qkv_bias": True, "proj_bias": False}  # whatever attention_bias says
    refuse_windows(config, shape["block_size"])
    return Architecture(family="qwen2", **shape)


def refuse_windows(config: Config, context: int) -> None:
    """Refuse Qwen's sliding window, which is in use only where use_sliding_window says so."""
    window = config.take("sliding_window")
    if config.flag("use_sliding_window", False):
        refuse_window(window or 0, context)
    layer_types = config.take("layer_types", default=[])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(
            "has layer_types other than 'full_attention', which are not supported. Use a model without them"
        )


FAMILY = Family(("qwen2",), read, LAYOUT)

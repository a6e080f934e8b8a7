"""Qwen2 and Qwen2.5: Llama with biases at queries, keys and values (Yang et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes, windows
from models.family import Config, Family

FIRST_WINDOW = 28  # Qwen2Config's default for a missing max_window_layers


def read(config: Config) -> Architecture:
    """Read a Qwen2Config."""
    shape = sizes(config)
    architecture = Architecture(family="qwen2", qkv_bias=True, **shape, **optional_windows(config, shape))
    config.take("attention_bias")  # the three biases are there whatever it says
    config.refuse_rest()
    return architecture


def optional_windows(config: Config, shape: dict[str, Any], layers: Iterable[int] | None = None) -> dict[str, Any]:
    """Return Qwen's window, which is in use where use_sliding_window says so, in the layers from max_window_layers on."""
    first, kinds = config.size("max_window_layers", default=FIRST_WINDOW, least=0), config.take("layer_types")
    layers = range(first, shape["n_layer"]) if layers is None else layers
    return windows(config, shape, layers, kinds, config.flag("use_sliding_window", False))


FAMILY = Family(("qwen2",), read, LAYOUT)

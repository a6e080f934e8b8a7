"""Qwen2 and Qwen2.5: Llama with biases at queries, keys and values (Yang et al., 2024)."""

from collections.abc import Iterable
from typing import Any

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.families.mistral import windows
from models.family import GGUF, Config, ConfigError, Family

FIRST_WINDOW = 28  # Qwen2Config's default for a missing max_window_layers


def read(config: Config) -> Architecture:
    """Read a Qwen2Config."""
    shape = sizes(config) | {"qkv_bias": True, "proj_bias": False}  # whatever attention_bias says
    return Architecture(family="qwen2", **shape, **optional_windows(config, shape))


def optional_windows(config: Config, shape: dict[str, Any], layers: Iterable[int] | None = None) -> dict[str, Any]:
    """Return Qwen's window, used where use_sliding_window says so, in `layers` or in those from max_window_layers on."""
    first, kinds = config.take("max_window_layers", default=FIRST_WINDOW), config.take("layer_types")
    if not isinstance(first, int) or first < 0:
        raise ConfigError(f"sets max_window_layers to {first!r}. Use a whole number from 0")
    layers = range(first, shape["n_layer"]) if layers is None else layers
    return windows(config, shape, layers, kinds, config.flag("use_sliding_window", False))


FAMILY = Family(("qwen2",), read, LAYOUT, (GGUF("qwen2", "qwen2"),))

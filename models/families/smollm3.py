"""SmolLM3: Llama in which every fourth layer has no rotary positions (Bakouch et al., 2025)."""

from __future__ import annotations

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.families.qwen2 import optional_windows
from models.family import Config, ConfigError, Family

THETA, INTERVAL = 2_000_000.0, 4  # SmolLM3Config's defaults


def read(config: Config) -> Architecture:
    """Read a SmolLM3Config. Its no_rope_layers has a 1 for each layer that rotates."""
    config = Config({"rope_theta": THETA, "tie_word_embeddings": True, **config.raw})
    shape = sizes(config)
    interval = config.size("no_rope_layer_interval", default=INTERVAL)
    layers = range(shape["n_layer"])
    rotates = config.take("no_rope_layers", default=[(layer + 1) % interval for layer in layers])
    if not isinstance(rotates, list) or len(rotates) < len(layers) or not all(isinstance(r, int) for r in rotates):
        raise ConfigError(
            f"sets no_rope_layers to something other than a number for each of {len(layers)} layers. "
            "Use the config.json that belongs to the weights"
        )
    biases = config.flag("attention_bias", False)
    unrotated = frozenset(layer for layer in layers if not rotates[layer])
    architecture = Architecture(
        family="smollm3", unrotated=unrotated, qkv_bias=biases, proj_bias=biases,
        mlp_bias=config.flag("mlp_bias", False), **shape, **optional_windows(config, shape, unrotated),
    )  # fmt: skip
    config.refuse_rest()
    return architecture


FAMILY = Family(("smollm3",), read, LAYOUT)

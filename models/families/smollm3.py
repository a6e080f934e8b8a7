"""SmolLM3: Llama in which every fourth layer has no rotary positions (Bakouch et al., 2025)."""

from models.architecture import Architecture
from models.families.llama import INTERLEAVED, LAYOUT, sizes
from models.families.qwen2 import optional_windows
from models.family import GGUF, Config, ConfigError, Family

THETA, INTERVAL = 2_000_000.0, 4  # SmolLM3Config's defaults


def read(config: Config) -> Architecture:
    """Read a SmolLM3Config. Its no_rope_layers has a 1 for each layer that rotates."""
    config.assume(rope_theta=THETA, tie_word_embeddings=True)
    config.take("pretraining_tp")  # which has no meaning for this family
    shape = sizes(config)
    interval, layers = config.size("no_rope_layer_interval", default=INTERVAL), range(shape["n_layer"])
    rotates = config.take("no_rope_layers", default=[(layer + 1) % interval for layer in layers])
    if not isinstance(rotates, list) or len(rotates) < len(layers):
        raise ConfigError(
            f"has no list of {len(layers)} no_rope_layers. Use the config.json that belongs to the weights"
        )
    unrotated = frozenset(layer for layer in layers if not rotates[layer])
    return Architecture(family="smollm3", unrotated=unrotated, **shape, **optional_windows(config, shape, unrotated))


FAMILY = Family(("smollm3",), read, LAYOUT, (GGUF("smollm3", "smollm3", INTERLEAVED),))

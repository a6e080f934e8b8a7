"""Granite 3, dense: Llama with four multipliers (IBM, 2024).

All but attention's go into the weights. A stream that is divided by the embedding's multiplier gives the same norms, as
long as their epsilon is divided by its square; so the embedding stays as it is, and what is added to it is scaled.
"""

from models.architecture import Architecture
from models.families.llama import INTERLEAVED, LAYOUT, sizes
from models.family import GGUF, KEYS, Config, Family


def read(config: Config) -> Architecture:
    """Read a GraniteConfig."""
    shape = sizes(config)
    stream = config.number("embedding_multiplier", 1.0)
    shape["norm_epsilon"] /= stream**2
    added, logits = config.number("residual_multiplier", 1.0) / stream, 1 / config.number("logits_scaling", 1.0)
    return Architecture(
        family="granite", attention_multiplier=config.number("attention_multiplier", 1.0),
        scales=(("attn_proj", added), ("mlp_proj", added), ("norm", logits)), **shape,
    )  # fmt: skip


MULTIPLIERS = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
FAMILY = Family(("granite",), read, LAYOUT, (GGUF("granite", "granite", INTERLEAVED, {**KEYS, **MULTIPLIERS}),))

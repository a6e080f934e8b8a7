"""OLMo 2: Llama with norms behind attention and MLP, and over all queries and keys (OLMo team, 2025)."""

from dataclasses import replace

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.family import GGUF, SEPARATE, Config, Family

NORMS = {"norm_1": ("post_attention_layernorm",), "norm_2": ("post_feedforward_layernorm",)}


def read(config: Config) -> Architecture:
    """Read an Olmo2Config."""
    config.assume(rms_norm_eps=1e-5)
    return Architecture(family="olmo2", norm_after=True, qk_norm=True, whole_qk_norm=True, **sizes(config))


GGUF_NORMS = {"norm_1": ("post_attention_norm",), "norm_2": ("post_ffw_norm",)}
FORM = GGUF("olmo2", "olmo2", replace(SEPARATE, parts={**SEPARATE.parts, **GGUF_NORMS}))
FAMILY = Family(("olmo2",), read, replace(LAYOUT, parts={**LAYOUT.parts, **NORMS}), (FORM,))

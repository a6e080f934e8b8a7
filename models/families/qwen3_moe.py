"""Qwen3's mixtures of experts: Qwen3 with one in each layer (Yang et al., 2025).

Models that have layers without experts (mlp_only_layers, decoder_sparse_step) are refused by these names.
"""

from dataclasses import replace

from models.architecture import Architecture
from models.families.llama import LAYOUT, sizes
from models.families.mixtral import mixture
from models.families.qwen2 import optional_windows
from models.family import GGUF, KEYS, MIXTURE, SEPARATE, Config, Family

INNER_SIZE = 768  # Qwen3MoeConfig's default
PARTS = {
    "router": ("mlp.gate",),
    "fc": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp_proj": ("mlp.experts.{}.down_proj",),
}


def read(config: Config) -> Architecture:
    """Read a Qwen3MoeConfig, whose intermediate_size is of layers without experts."""
    config.assume(intermediate_size=INNER_SIZE)
    shape = sizes(config) | {"inner_size": config.size("moe_intermediate_size", default=INNER_SIZE)}
    shape |= optional_windows(config, shape, range(shape["n_layer"])) | mixture(config, 128, 8)
    normalized = config.flag("norm_topk_prob", False)
    return Architecture(family="qwen3_moe", qk_norm=True, experts_normalized=normalized, **shape)


FORM = GGUF(
    "qwen3moe", "qwen3_moe", replace(SEPARATE, parts={**SEPARATE.parts, **MIXTURE}),
    {
        **KEYS, "moe_intermediate_size": "expert_feed_forward_length", "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    },
    fixed={"norm_topk_prob": True},
)  # fmt: skip
FAMILY = Family(("qwen3_moe",), read, replace(LAYOUT, parts={**LAYOUT.parts, **PARTS}), (FORM,))

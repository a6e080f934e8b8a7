"""Mixtral: Mistral whose MLP is a mixture of experts (Jiang et al., 2024). Families of mixtures build on this one."""

from dataclasses import replace
from typing import Any

from models.architecture import Architecture
from models.families.llama import INTERLEAVED, LAYOUT, sizes
from models.families.mistral import windows
from models.family import GGUF, KEYS, MIXTURE, Config, ConfigError, Family

UNUSED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # of training
PARTS = {
    "router": ("block_sparse_moe.gate",),
    "fc": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "mlp_proj": ("block_sparse_moe.experts.{}.w2",),
}


def read(config: Config) -> Architecture:
    """Read a MixtralConfig."""
    config.assume(rms_norm_eps=1e-5, sliding_window=None)
    shape = sizes(config)
    shape |= windows(config, shape, range(shape["n_layer"])) | mixture(config, 8, 2)
    return Architecture(family="mixtral", experts_normalized=True, **shape)


def mixture(config: Config, experts: int, chosen: int) -> dict[str, Any]:
    """Return the number of experts and of those that a token goes to, by default these, as arguments of Architecture."""
    config.take(*UNUSED)
    experts = config.size("num_experts", "num_local_experts", default=experts)
    chosen = config.size("num_experts_per_tok", default=chosen)
    if chosen > experts:
        raise ConfigError(
            f"sets num_experts_per_tok to {chosen}, but has {experts} experts. Use the config.json that belongs to the weights"
        )
    return {"experts": experts, "experts_chosen": chosen}


FORM = GGUF(
    "llama", "mixtral", replace(INTERLEAVED, parts={**INTERLEAVED.parts, **MIXTURE}),
    {**KEYS, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}, needs="expert_count",
)  # fmt: skip
FAMILY = Family(("mixtral",), read, replace(LAYOUT, parts={**LAYOUT.parts, **PARTS}), (FORM,))

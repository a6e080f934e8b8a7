"""Phi-1, Phi-1.5 and Phi-2: heads that rotate in part, attention beside the MLP, biases everywhere (Li et al., 2023)."""

from dataclasses import replace

from models.architecture import Architecture
from models.families import llama
from models.family import FUSED, GGUF, SEPARATE, SIZES, Config, Family

LAYOUT = replace(
    llama.LAYOUT, norm="final_layernorm",
    parts={**llama.LAYOUT.parts, "attn_proj": ("self_attn.dense",), "fc": ("mlp.fc1",), "mlp_proj": ("mlp.fc2",)},
)  # fmt: skip


def read(config: Config) -> Architecture:
    """Read a PhiConfig."""
    config.assume(
        rms_norm_eps=config.take("layer_norm_eps", default=1e-5), partial_rotary_factor=0.5, hidden_act="gelu_new",
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    shape = llama.sizes(config, rotates="part") | {"norm": "layer", "gated": False}
    return Architecture(family="phi", parallel=True, one_norm=True, head_bias=True, **shape)


KEYS = {
    **SIZES, "layer_norm_eps": "attention.layer_norm_epsilon", "rope_theta": "rope.freq_base",
    "partial_rotary_factor": "rope.dimension_count",
}  # fmt: skip
NEW = GGUF("phi2", "phi", replace(SEPARATE, parts={**SEPARATE.parts, "fc": ("ffn_up",)}), KEYS)
OLD = replace(NEW, layout=FUSED, needs="blk.0.attn_qkv.weight")
FAMILY = Family(("phi",), read, LAYOUT, (NEW, OLD))

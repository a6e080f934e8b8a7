"""GPT-NeoX and Pythia: layer norms, heads that rotate in part, attention beside the MLP (Black et al., 2022)."""

import re

from models.architecture import Architecture
from models.families.llama import sizes
from models.family import FUSED, GGUF, SIZES, Config, Family, Layout

LAYOUT = Layout(
    prefix="gpt_neox.", embedding="embed_in", norm="final_layer_norm", head="embed_out", layer="layers.{}.",
    parts={
        "norm_1": ("input_layernorm",), "qkv": ("attention.query_key_value",), "attn_proj": ("attention.dense",),
        "norm_2": ("post_attention_layernorm",), "fc": ("mlp.dense_h_to_4h",), "mlp_proj": ("mlp.dense_4h_to_h",),
    },
    ignored=re.compile(r"attention\.(masked_bias|bias|rotary_emb\.inv_freq)$"),  # stored by old versions
    by_kv_head=True,
)  # fmt: skip


def read(config: Config) -> Architecture:
    """Read a GPTNeoXConfig."""
    config.assume(
        rope_theta=config.take("rotary_emb_base"), partial_rotary_factor=config.take("rotary_pct", default=0.25),
        rms_norm_eps=config.take("layer_norm_eps", default=1e-5), hidden_act="gelu", attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    shape = sizes(config, rotates="part") | {"norm": "layer", "gated": False}
    return Architecture(family="gpt_neox", parallel=config.flag("use_parallel_residual", True), **shape)


KEYS = {
    **SIZES, "layer_norm_eps": "attention.layer_norm_epsilon", "rotary_emb_base": "rope.freq_base",
    "rotary_pct": "rope.dimension_count", "use_parallel_residual": "use_parallel_residual",
}  # fmt: skip
FAMILY = Family(("gpt_neox",), read, LAYOUT, (GGUF("gptneox", "gpt_neox", FUSED, KEYS),))

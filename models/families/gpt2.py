"""GPT-2: layer norm, a table of positions, GELU, biases everywhere (Radford et al., 2019)."""

import re

from models.architecture import Architecture
from models.families.llama import WIDTH, sizes
from models.family import FUSED, GGUF, Config, Family, Layout


def read(config: Config) -> Architecture:
    """Read a GPT2Config, whose own defaults stand for what config.json leaves out."""
    config.assume(
        n_embd=768, n_head=12, n_layer=12, n_inner=4 * config.size(*WIDTH, default=768), n_ctx=1024,
        hidden_act=config.take("activation_function", default="gelu_new"), attention_bias=True, mlp_bias=True,
        rms_norm_eps=config.take("layer_norm_epsilon", default=1e-5), vocab_size=50257, tie_word_embeddings=True,
    )  # fmt: skip
    return Architecture(
        family="gpt2",
        scale_attention=config.flag("scale_attn_weights", True),
        scale_by_layer=config.flag("scale_attn_by_inverse_layer_idx", False),
        **sizes(config, rotates="not") | {"norm": "layer", "gated": False},
    )


FAMILY = Family(
    ("gpt2",),
    read,
    Layout(
        prefix="transformer.", embedding="wte", positions="wpe", norm="ln_f", layer="h.{}.",
        parts={
            "norm_1": ("ln_1",), "qkv": ("attn.c_attn",), "attn_proj": ("attn.c_proj",),
            "norm_2": ("ln_2",), "fc": ("mlp.c_fc",), "mlp_proj": ("mlp.c_proj",),
        },
        transposed=True,
        ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias$"),  # causal masks stored by old versions
    ),
    (
        GGUF("gpt2", "gpt2", FUSED, {
            "n_embd": "embedding_length", "n_inner": "feed_forward_length", "n_layer": "block_count",
            "n_head": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
            "n_positions": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        }),
    ),
    shares_tokenizer=True,
)  # fmt: skip

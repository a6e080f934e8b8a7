"""GPT-2: layer norm, a table of positions, GELU, biases everywhere (Radford et al., 2019)."""

from __future__ import annotations

import re

from models.architecture import Architecture
from models.family import MOST_LAYERS, Config, ConfigError, Family, Layout


def read(config: Config) -> Architecture:
    """Read a GPT2Config, whose own defaults stand for what config.json leaves out."""
    width = config.size("n_embd", "hidden_size", default=768)
    n_head = config.size("n_head", "num_attention_heads", default=12)
    if width % n_head:
        raise ConfigError(
            f"has n_embd {width}, which is not a multiple of n_head {n_head}. "
            "Use the config.json that belongs to the weights"
        )
    return Architecture(
        family="gpt2",
        block_size=config.size("n_positions", "max_position_embeddings", "n_ctx", default=1024),
        vocab_size=config.size("vocab_size", default=50257),
        n_layer=config.size("n_layer", "num_hidden_layers", default=12, most=MOST_LAYERS),
        n_embd=width,
        n_head=n_head,
        n_kv_head=n_head,
        head_size=width // n_head,
        inner_size=config.size("n_inner", default=4 * width),
        norm="layer",
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5, below=1),
        rope=None,
        activation=config.activation("activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        proj_bias=True,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", True),
        scale_attention=config.flag("scale_attn_weights", True),
        scale_by_layer=config.flag("scale_attn_by_inverse_layer_idx", False),
    )


FAMILY = Family(
    ("gpt2",),
    read,
    Layout(
        prefix="transformer.",
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        layer="h.{}.",
        parts={
            "norm_1": ("ln_1",),
            "qkv": ("attn.c_attn",),
            "attn_proj": ("attn.c_proj",),
            "norm_2": ("ln_2",),
            "fc": ("mlp.c_fc",),
            "mlp_proj": ("mlp.c_proj",),
        },
        transposed=True,
        ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias$"),  # causal masks stored by old versions
    ),
    shares_tokenizer=True,
)

"""Llama 2 and 3, SmolLM2, TinyLlama, and Mistral without a window.

RMS norm, rotary positions, grouped heads, SwiGLU (Touvron et al., 2023; Grattafiori et al., 2024). Qwen's files build
on this one.
"""

from __future__ import annotations

import re
from typing import Any

from models.architecture import Architecture
from models.family import MOST_LAYERS, Config, ConfigError, Family, Layout

MISTRALS_WINDOW = 4096  # MistralConfig's default for a missing sliding_window; null means none

LAYOUT = Layout(
    prefix="model.",
    embedding="embed_tokens",
    norm="norm",
    layer="layers.{}.",
    parts={
        "norm_1": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn_proj": ("self_attn.o_proj",),
        "norm_2": ("post_attention_layernorm",),
        "fc": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp_proj": ("mlp.down_proj",),
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
    },
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),  # frequencies stored by old versions
)


def read(config: Config) -> Architecture:
    """Read a LlamaConfig or a MistralConfig."""
    shape = sizes(config)
    if config.raw.get("model_type") == "mistral":
        window = config.take("sliding_window", default=None if "sliding_window" in config.raw else MISTRALS_WINDOW)
        refuse_window(window, shape["block_size"])
    return Architecture(family="llama", **shape)


def sizes(config: Config) -> dict[str, Any]:
    """Return what the Llama-shaped families share, as arguments of Architecture."""
    width = config.size("hidden_size")
    n_head = config.size("num_attention_heads")
    n_kv_head = config.size("num_key_value_heads", default=n_head)
    if n_head % n_kv_head:
        raise ConfigError(
            f"has num_attention_heads {n_head}, which is not a multiple of num_key_value_heads {n_kv_head}. "
            "Use the config.json that belongs to the weights"
        )
    if config.raw.get("head_dim") is None and width % n_head:
        raise ConfigError(
            f"has hidden_size {width}, which is not a multiple of num_attention_heads {n_head}, and no head_dim. "
            "Use the config.json that belongs to the weights"
        )
    biases = config.flag("attention_bias", False)
    head_size = config.size("head_dim", default=width // n_head or 1)
    if head_size % 2:
        raise ConfigError(f"has heads of {head_size}, but rotary positions need pairs. Use an even head_dim")
    return {
        "block_size": config.size("max_position_embeddings"),
        "vocab_size": config.size("vocab_size"),
        "n_layer": config.size("num_hidden_layers", most=MOST_LAYERS),
        "n_embd": width,
        "n_head": n_head,
        "n_kv_head": n_kv_head,
        "head_size": head_size,
        "inner_size": config.size("intermediate_size"),
        "norm": "rms",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6, below=1),
        "rope": config.rope(),
        "activation": config.activation("hidden_act", "silu"),
        "gated": True,
        "qkv_bias": biases,
        "proj_bias": biases,
        "mlp_bias": config.flag("mlp_bias", False),
        "tied": config.flag("tie_word_embeddings", False),
    }


def refuse_window(window: Any, context: int) -> None:
    """Raise ConfigError for a sliding window, unless it is as long as the context."""
    if window is not None and (not isinstance(window, int) or window < context):
        raise ConfigError(
            f"has a sliding_window of {window!r} tokens in a context of {context:,}, which is not supported. "
            "Use a model without a window"
        )


FAMILY = Family(("llama", "mistral"), read, LAYOUT)

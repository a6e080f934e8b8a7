"""Llama 2 and 3, SmolLM2, TinyLlama and Mistral.

RMS norm, rotary positions, grouped heads, SwiGLU (Touvron et al., 2023; Grattafiori et al., 2024). Qwen's files build
on this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from models.architecture import Architecture
from models.family import MOST_LAYERS, Config, ConfigError, Family, Layout

WINDOW = 4096  # what transformers takes for a missing sliding_window; null means none
KINDS = ["full_attention", "sliding_attention"]

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
    biases = config.flag("attention_bias", False)
    shape = sizes(config)
    if config.raw.get("model_type") == "mistral":
        shape |= windows(config, shape, range(shape["n_layer"]))
    architecture = Architecture(
        family="llama", qkv_bias=biases, proj_bias=biases, mlp_bias=config.flag("mlp_bias", False), **shape
    )
    config.refuse_rest()
    return architecture


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
        "tied": config.flag("tie_word_embeddings", False),
    }


def windows(
    config: Config, shape: dict[str, Any], layers: Iterable[int], kinds: Any = None, used: bool = True
) -> dict[str, Any]:
    """Return the sliding window of these layers, or of those that `kinds` of layers name, as arguments of Architecture."""
    window = config.take("sliding_window", default=None if "sliding_window" in config.raw else WINDOW)
    window = window if used else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != shape["n_layer"] or any(kind not in KINDS for kind in kinds):
            raise ConfigError(
                f"sets layer_types to something other than one of {', '.join(KINDS)} for each of {shape['n_layer']} "
                "layers. Use the config.json that belongs to the weights"
            )
        layers = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    elif window is None:
        return {}
    windowed = frozenset(layers)
    if windowed and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ConfigError(f"sets sliding_window to {window!r}. Use a whole number from 1")
    return {"window": window, "windowed": windowed} if windowed and window < shape["block_size"] else {}


FAMILY = Family(("llama", "mistral"), read, LAYOUT)

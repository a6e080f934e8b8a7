"""Llama 2 and 3, SmolLM2 and TinyLlama.

RMS norm, rotary positions, grouped heads, SwiGLU (Touvron et al., 2023; Grattafiori et al., 2024). Qwen's files build
on this one.
"""

import re
from dataclasses import replace
from typing import Any, Literal

from models.architecture import Architecture, Rope
from models.family import GGUF, MOST_LAYERS, SEPARATE, Config, ConfigError, Family, Layout

WIDTH, HEADS = ("hidden_size", "n_embd", "n_embed"), ("num_attention_heads", "n_head")  # names of one size

LAYOUT = Layout(
    prefix="model.", embedding="embed_tokens", norm="norm", layer="layers.{}.",
    parts={
        "norm_1": ("input_layernorm",), "norm_2": ("post_attention_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attn_proj": ("self_attn.o_proj",),
        "fc": ("mlp.gate_proj", "mlp.up_proj"), "mlp_proj": ("mlp.down_proj",),
        "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",),
    },
    ignored=re.compile(r"\.rotary_emb\.inv_freq$"),  # frequencies stored by old versions
)  # fmt: skip

INTERLEAVED = replace(SEPARATE, interleaved=True)  # in GGUF files


def read(config: Config) -> Architecture:
    """Read a LlamaConfig."""
    return Architecture(family="llama", **sizes(config))


def sizes(config: Config, rotates: Literal["whole", "part", "not"] = "whole") -> dict[str, Any]:
    """Return what most families share, as arguments of Architecture. rotates: what heads may do in this family."""
    width, n_head = config.size(*WIDTH), config.size(*HEADS)
    n_kv_head = config.size("num_key_value_heads", default=n_head)
    if n_head % n_kv_head:
        raise ConfigError(
            f"has num_attention_heads {n_head}, which is not a multiple of num_key_value_heads {n_kv_head}. "
            "Use the config.json that belongs to the weights"
        )
    if config.raw.get("head_dim") is None and width % n_head:
        raise ConfigError(
            f"has {config.name(*WIDTH)} {width}, which is not a multiple of {config.name(*HEADS)} {n_head}, and no head_dim. "
            "Use the config.json that belongs to the weights"
        )
    biases = config.flag("attention_bias", False)
    shape: dict[str, Any] = {
        "block_size": config.size("max_position_embeddings", "n_positions", "n_ctx"),
        "vocab_size": config.size("vocab_size"),
        "n_layer": config.size("num_hidden_layers", "n_layer", most=MOST_LAYERS),
        "n_embd": width,
        "n_head": n_head,
        "n_kv_head": n_kv_head,
        "head_size": config.size("head_dim", default=width // n_head or 1),
        "inner_size": config.size("intermediate_size", "n_inner", "ffn_hidden_size"),
        "norm": "rms",
        "norm_epsilon": config.number("rms_norm_eps", 1e-6, below=1),
        "activation": config.activation("hidden_act", "silu"),
        "gated": True,
        "qkv_bias": biases,
        "proj_bias": biases,
        "mlp_bias": config.flag("mlp_bias", False),
        "tied": config.flag("tie_word_embeddings", False),
    }
    return shape | {"rope": None if rotates == "not" else _rope(config, shape["head_size"], rotates == "part")}


def _rope(config: Config, head_size: int, partial: bool) -> Rope:
    rope = config.rope()
    rotated = int(head_size * rope.part)
    if rope.part != 1 and not partial:
        raise ConfigError("sets partial_rotary_factor, which this family does not have. Use a model without it")
    if head_size % 2 or rotated % 2:
        raise ConfigError(f"rotates {rotated} of heads of {head_size}, but only pairs rotate. Use an even head_dim")
    if rope.longrope and {len(rope.longrope.short), len(rope.longrope.long)} != {rotated // 2}:
        raise ConfigError(f"sets no short_factor and long_factor of {rotated // 2} numbers. Use its own config.json")
    return rope


FAMILY = Family(("llama",), read, LAYOUT, (GGUF("llama", "llama", INTERLEAVED),))

"""Gemma 2, and the text models of Gemma 3: windows, norms before and behind, scaled embeddings (Gemma team, 2024, 2025).

Gemma 3 has another rotation in layers with a window, and norms of heads; Gemma 2 caps scores and logits.
"""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture, Rope
from models.families.llama import LAYOUT, sizes
from models.families.mistral import KINDS, windows
from models.family import Config, ConfigError, Family, positive

NORMS = {
    "attn_norm": ("post_attention_layernorm",), "norm_2": ("pre_feedforward_layernorm",),
    "mlp_norm": ("post_feedforward_layernorm",),
}  # fmt: skip


def read(config: Config) -> Architecture:
    """Read a Gemma2Config or a Gemma3TextConfig, whose defaults stand for what is missing."""
    second = config.raw.get("model_type") == "gemma2"
    config.assume(head_dim=256, tie_word_embeddings=True)
    local = None if second else _local_rope(config)
    shape = sizes(config) | {"activation": config.activation("hidden_activation", "gelu_pytorch_tanh")}
    config.take("cache_implementation", "sliding_window_size")  # of generate(), and an older name of the window
    period = 2 if second else config.size("sliding_window_pattern", default=6)
    layers = [layer for layer in range(shape["n_layer"]) if (layer + 1) % period]
    return Architecture(
        family="gemma", **shape, **windows(config, shape, layers, config.take("layer_types")), local_rope=local,
        qk_norm=not second, both_norms=True, norm_offset=1.0, embedding_scale=shape["n_embd"] ** 0.5,
        attention_multiplier=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=_cap(config, "attn_logit_softcapping", 50.0) if second else 0.0,
        logits_cap=_cap(config, "final_logit_softcapping", 30.0 if second else None),
    )  # fmt: skip


def _local_rope(config: Config) -> Rope:
    """Return the rotation of layers with a window, and leave that of the others in `config`."""
    both = config.raw.get("rope_parameters") or {}
    if not isinstance(both, dict) or not both.keys() <= set(KINDS):
        raise ConfigError(f"sets rope_parameters to other keys than {' and '.join(KINDS)}. Use its own config.json")
    config.assume(rope_theta=1e6)
    config.raw = {**config.raw, "rope_parameters": both.get(KINDS[0])}
    theta = config.take("rope_local_base_freq", default=1e4)
    return Config({"rope_theta": theta, "rope_parameters": both.get(KINDS[1])}).rope()


def _cap(config: Config, key: str, default: float | None) -> float:
    value = config.take(key, default=None if key in config.raw else default)
    return 0.0 if value is None else positive(key, value)


FAMILY = Family(("gemma2", "gemma3_text"), read, replace(LAYOUT, parts={**LAYOUT.parts, **NORMS}))

"""Gemma 2, and the text models of Gemma 3: windows, norms before and behind, scaled embeddings (Gemma team, 2024, 2025).

Gemma 3 has another rotation in layers with a window, and norms of heads; Gemma 2 caps scores and logits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.architecture import Architecture, Rope
from models.families.llama import LAYOUT, sizes
from models.families.mistral import KINDS, WINDOWED, windows
from models.family import GGUF, Config, ConfigError, Family, positive

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
        qk_norm=not second, both_norms=True, embedding_scale=shape["n_embd"] ** 0.5,
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


def _query_scale(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalar that GGUF files do not name: the models of 27B have another one, and are known by their layers."""
    large = values["num_hidden_layers"] in (46, 62)
    size = values["hidden_size"] / values["num_attention_heads"] if large else values["head_dim"]
    return {"query_pre_attn_scalar": size}


CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
SECOND = GGUF("gemma2", "gemma2", keys={**WINDOWED, **CAPS}, derived=_query_scale)
THIRD = replace(
    SECOND, architecture="gemma3", model_type="gemma3_text", fixed={"sliding_window": None},
    keys={**SECOND.keys, "rope_local_base_freq": "rope.freq_base_swa",
          "sliding_window_pattern": "attention.sliding_window_pattern"},
)  # fmt: skip
STORED = replace(LAYOUT, parts={**LAYOUT.parts, **NORMS}, norm_offset=1.0)
FAMILY = Family(("gemma2", "gemma3_text"), read, STORED, (SECOND, THIRD))

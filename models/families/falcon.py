"""Falcon with rotary positions: one head of keys or several, attention beside the MLP (Almazrouei et al., 2023)."""

from dataclasses import replace

from models.architecture import Architecture
from models.families import gpt_neox
from models.families.llama import HEADS, WIDTH, sizes
from models.family import FUSED, GGUF, SIZES, Config, Family

ATTENTION = {"qkv": ("self_attention.query_key_value",), "attn_proj": ("self_attention.dense",)}
LAYOUT = replace(
    gpt_neox.LAYOUT, prefix="transformer.", embedding="word_embeddings", norm="ln_f", head="lm_head", layer="h.{}.",
    parts={**gpt_neox.LAYOUT.parts, **ATTENTION},
    renamed={"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"},
)  # fmt: skip


def read(config: Config) -> Architecture:
    """Read a FalconConfig. Its new architecture groups heads, and may have two norms before attention and MLP."""
    new, alone = (config.flag(*switch) for switch in (("new_decoder_architecture", False), ("multi_query", True)))
    parallel, norms = config.flag("parallel_attn", True) or new, config.take("num_ln_in_parallel_attn", default=2)
    heads, stored, bias = config.size(*HEADS), config.take("num_kv_heads"), config.flag("bias", False)
    config.assume(
        num_key_value_heads=stored if new else 1 if alone else heads, ffn_hidden_size=4 * config.size(*WIDTH),
        rms_norm_eps=config.take("layer_norm_epsilon", default=1e-5), attention_bias=bias, mlp_bias=bias,
        hidden_act=config.take("activation", default="gelu"), max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    shape = sizes(config) | {"norm": "layer", "gated": False}
    return Architecture(family="falcon", parallel=parallel, one_norm=parallel and not (new and norms == 2), **shape)


KEYS = {**SIZES, "layer_norm_epsilon": "attention.layer_norm_epsilon", "rope_theta": "rope.freq_base"}
ONE_NORM = GGUF("falcon", "falcon", FUSED, KEYS)
TWO_NORMS = replace(
    ONE_NORM, layout=replace(FUSED, parts={**FUSED.parts, "norm_1": ("attn_norm_2",), "norm_2": ("attn_norm",)}),
    fixed={"new_decoder_architecture": True}, needs="blk.0.attn_norm_2.weight",
)  # fmt: skip
FAMILY = Family(("falcon",), read, LAYOUT, (ONE_NORM, TWO_NORMS))

"""BLOOM: ALiBi in place of positions, a norm behind the embedding (BigScience, 2022)."""

from models.architecture import Architecture
from models.families.falcon import LAYOUT
from models.families.llama import WIDTH, sizes
from models.family import FUSED, GGUF, SIZES, Config, Family

HARMLESS = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
            "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact")  # fmt: skip


def read(config: Config) -> Architecture:
    """Read a BloomConfig, whose seq_length is what the model was trained on."""
    config.take(*HARMLESS)
    config.assume(
        n_inner=4 * config.size(*WIDTH), n_positions=config.take("seq_length", default=2048), hidden_act="gelu_new",
        rms_norm_eps=config.take("layer_norm_epsilon", default=1e-5), attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    shape = sizes(config, rotates="not") | {"norm": "layer", "gated": False}
    return Architecture(family="bloom", alibi=True, embedding_norm=True, **shape)


FORM = GGUF("bloom", "bloom", FUSED, {**SIZES, "layer_norm_epsilon": "attention.layer_norm_epsilon"})
FAMILY = Family(("bloom",), read, LAYOUT, (FORM,))

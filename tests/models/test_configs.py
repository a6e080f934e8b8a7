"""A config.json is understood or refused: no switch is ignored, and no size is taken on trust."""

from __future__ import annotations

from typing import Any

import pytest

from models.architecture import Architecture, Llama3Scaling
from models.families import architecture_of, by_model_type
from models.family import ConfigError
from tests.support.checkpoints import transformers

SHAPE = {"vocab_size": 211, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 6, "max_position_embeddings": 160}  # fmt: skip
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}

OLD: dict[str, dict[str, Any]] = {  # what files of version 4 have
    "smollm3": {"num_key_value_heads": 2, "rope_theta": 5e6, "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "gemma3_text": {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0,
                    "sliding_window_pattern": 2, "sliding_window": 32, "num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"sliding_window": 32, "num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": None},
    "granite": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "residual_multiplier": 0.2},
    "olmo2": {"rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": 3},
    "phi3": {
        "rope_theta": 5e5, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, "sliding_window": 160,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 5e5, "use_parallel_residual": False},
    "mixtral": {"rope_theta": 1e6, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": None},
    "qwen3_moe": {"rope_theta": 1e6, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "falcon": {"rope_theta": 1e4, "num_kv_heads": 3, "new_decoder_architecture": True, "intermediate_size": 192},
    "phi": {"rope_theta": 5e4, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-4, "num_key_value_heads": 3},
    "bloom": {"n_embed": 48, "n_layer": 2, "seq_length": 64, "offset_alibi": 100, "pretraining_tp": 4},
}  # fmt: skip


def read(model_type: str = "llama", **changes: Any) -> Architecture:
    return architecture_of({"model_type": model_type, **SHAPE, **changes})


@pytest.mark.parametrize("model_type", [*by_model_type()])
def test_every_key_that_transformers_writes_is_understood(model_type: str) -> None:
    raw = transformers().AutoConfig.for_model(model_type)
    config = architecture_of(raw.to_dict())
    assert (config.vocab_size, config.n_layer) == (raw.vocab_size, raw.num_hidden_layers)
    assert config.norm_epsilon == getattr(raw, "rms_norm_eps", 1e-5)


def test_switches_are_read_as_versions_4_and_5_of_transformers_write_them() -> None:
    for model_type, old in OLD.items():
        raw = transformers().AutoConfig.for_model(model_type, **{**SHAPE, **old}).to_dict()
        assert architecture_of({"model_type": model_type, **SHAPE, **old}) == architecture_of(raw)


def test_rotations_are_read_as_versions_4_and_5_of_transformers_write_them() -> None:
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}).rope
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}).rope
    assert old == new
    assert new is not None
    assert (new.theta, new.llama3) == (5e5, Llama3Scaling(32, 1, 4, 8192))
    older = read(rope_scaling={"type": "linear", "factor": 2.5}).rope
    assert older is not None
    assert (older.theta, older.factor) == (10_000, 2.5)


def test_head_size_kv_heads_and_head_are_what_the_family_says_by_default() -> None:
    for model_type, head_size in (("llama", 8), ("qwen2", 8), ("qwen3", 128)):
        config = read(model_type)
        assert (config.head_size, config.n_kv_head, config.tied) == (head_size, 6, False)
    assert read("llama", head_dim=24, num_key_value_heads=2).qkv_size == 10 * 24


def test_biases_and_head_norms_are_the_familys() -> None:
    flags = {t: (c.qkv_bias, c.proj_bias, c.mlp_bias, c.qk_norm)
             for t in ("llama", "qwen2", "qwen3") for c in [read(t)]}  # fmt: skip
    assert flags == {"llama": (False,) * 4, "qwen2": (True, False, False, False), "qwen3": (False, False, False, True)}
    biased = read("llama", attention_bias=True)
    assert (biased.qkv_bias, biased.proj_bias, biased.mlp_bias) == (True, True, False)


def test_a_switch_that_is_off_or_changes_nothing_is_no_obstacle() -> None:
    off = {"sliding_window": None, "num_experts": 0, "new_switch": False, "another": [], "pretraining_tp": 1,
           "attention_dropout": 0.1, "partial_rotary_factor": 1.0, "use_cache": True}  # fmt: skip
    assert read(**off) == read()
    unused = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
    assert read("qwen2", **unused) == read("qwen2")
    assert read("mistral", sliding_window=160).reach_of(0) == read("mistral", sliding_window=None).reach_of(0)


def test_a_window_is_in_the_layers_that_the_config_names() -> None:
    optional = {"use_sliding_window": True, "sliding_window": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    for model_type, changes, window, layers in (
        ("gemma2", {}, 4096, {0}),
        ("gemma3_text", {"num_hidden_layers": 7}, 4096, {0, 1, 2, 3, 4, 6}),
        ("mistral", {"sliding_window": 32}, 32, {0, 1}),
        ("mistral", {"max_position_embeddings": 8192}, 4096, {0, 1}),
        ("qwen2", {**optional, "max_window_layers": 1}, 32, {1}),
        ("qwen2", {**optional, "max_window_layers": 0}, 32, {0, 1}),
        ("qwen3", {**optional, **kinds}, 32, {0}),
        ("qwen3", {**optional, "sliding_window": None, "max_window_layers": 0}, 0, set()),
        ("phi3", {"original_max_position_embeddings": 160, "sliding_window": 47}, 47, {0, 1}),
        ("smollm3", {**optional, "no_rope_layers": [1, 0]}, 32, {1}),
    ):
        config = read(model_type, **changes)
        assert (config.window, config.windowed) == (window, layers)


def test_what_published_files_say_beside_is_no_obstacle() -> None:
    remote = {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "full_attn_mod": 1, "interpolate_factor": 1}
    assert read("phi3", **remote, lm_head_bias=False) == read("phi3")
    assert read("smollm3", num_key_value_heads=2, pretraining_tp=2) == read("smollm3", num_key_value_heads=2)
    assert read("gpt_neox", attention_probs_dropout_prob=0, hidden_act="gelu_fast").activation == "gelu_fast"


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding_window to 0": ("mistral", {"sliding_window": 0}),
    "max_window_layers": ("qwen2", {"max_window_layers": -1}),
    "other than full_attention for each layer": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
    "sets sliding_window": ("llama", {"sliding_window": 32}),
    "layer_types": ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}),
    "sets layer_types to": ("mistral", {"layer_types": ["sliding_attention"] * 2}),
    "use_bidirectional_attention": ("gemma3_text", {"use_bidirectional_attention": True}),
    "rope_parameters": ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}),
    "attn_logit_softcapping": ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    "final_logit_softcapping to 0": ("gemma2", {"final_logit_softcapping": 0.0}),
    "'yarn'": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "'dynamic'": ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "attention_factor": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 2.0}}),
    "full_attention": ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
    "low_freq_factor": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}),
    "rope_theta": ("llama", {"rope_theta": -1}),
    "partial_rotary_factor": ("llama", {"partial_rotary_factor": 0.5}),
    "pretraining_tp": ("llama", {"pretraining_tp": 2}),
    "num_experts": ("qwen3", {"num_experts": 128}),
    "quantization_config": ("llama", {"quantization_config": {"quant_method": "awq"}}),
    "final_logit_softcapping": ("llama", {"final_logit_softcapping": 30.0}),
    "no_rope_layers": ("smollm3", {"no_rope_layers": [1]}),
    "of 4 numbers": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        },
    ),
    "sets long_factor": (
        "phi3",
        {"original_max_position_embeddings": 64, "rope_scaling": {"type": "su", "long_factor": ["1"]}},
    ),
    "num_experts_per_tok to 9": ("mixtral", {"num_experts_per_tok": 9}),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "shared_expert_intermediate_size": ("qwen3_moe", {"shared_expert_intermediate_size": 64}),
    "alibi": ("falcon", {"alibi": True}),
    "new_switch": ("llama", {"new_switch": "on"}),
    "hidden_act to 'mish'": ("llama", {"hidden_act": "mish"}),
    "num_key_value_heads 4": ("llama", {"num_key_value_heads": 4}),
    "hidden_size 50": ("llama", {"hidden_size": 50}),
    "heads of 7": ("llama", {"head_dim": 7}),
    "vocab_size to 1152921504606846976": ("llama", {"vocab_size": 2**60}),
    "num_hidden_layers to True": ("llama", {"num_hidden_layers": True}),
    "rms_norm_eps to 2": ("llama", {"rms_norm_eps": 2}),
    "no max_position_embeddings": ("llama", {"max_position_embeddings": None}),
    "tie_word_embeddings": ("llama", {"tie_word_embeddings": "yes"}),
    "vision_config sets a vision tower": ("gemma3", {"vision_config": {"image_size": 896}}),
    "kv_lora_rank sets multi-head latent": ("deepseek_v3", {"kv_lora_rank": 512, "n_routed_experts": 256}),
    "mamba_d_state sets state space": ("jamba", {"mamba_d_state": 16}),
    "linear_num_value_heads sets linear": ("qwen3_next", {"linear_num_value_heads": 32}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_would_change_the_answers_is_refused_by_name_with_the_remedy(named: str) -> None:
    model_type, changes = REFUSED[named]
    with pytest.raises(ConfigError) as refusal:
        read(model_type, **changes)
    assert named in str(refusal.value)
    assert ". Use " in str(refusal.value)

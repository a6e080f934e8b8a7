"""Each family in several shapes computes what transformers computes, alone and among others, on both runners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.network import Network
from tests.support import points
from tests.support.families import build_pair, check_adapter, check_equal, check_near

MANY_TO_ONE = {"num_attention_heads": 4, "num_key_value_heads": 1}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "partial_rotary_factor": 1.0,
        "long_factor": [1.0, 3.0, 9.0, 27.0], "original_max_position_embeddings": 64}  # fmt: skip
GEMMA = {"sliding_window": 16, "query_pre_attn_scalar": 20}
LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama, 8:1, llama3 scaling": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama, linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of 64": ("llama", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"rms_norm_eps": 0.1, "num_key_value_heads": 2, "sliding_window": None}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 6}),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "smollm3, untied, heads of 6": ("smollm3", {**MANY_TO_ONE, "head_dim": 6, "tie_word_embeddings": False}),
    "smollm3, biases, own layers": ("smollm3", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 0]}),
    "mistral, a window of 16": ("mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
    "mistral, a window of 256, heads of 6": ("mistral", {**MANY_TO_ONE, "head_dim": 6, "sliding_window": 256}),
    "phi3, a window of 16": ("phi3", {"num_key_value_heads": 2, "sliding_window": 16}),
    "mistral, a window of 1": ("mistral", {"num_key_value_heads": 6, "sliding_window": 1}),
    "qwen2, windows from layer 1": ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3, a window in layer 1": ("qwen3", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 100, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "smollm3, windows": ("smollm3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5}),
    "gemma3, heads of 10, every second layer": ("gemma3_text", {**GEMMA, "head_dim": 10, "num_key_value_heads": 2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "gemma3, untied, window of 5, linear": ("gemma3_text", {**GEMMA, **MANY_TO_ONE, "head_dim": 12, "tie_word_embeddings": False, "sliding_window": 5, "rope_parameters": LOCAL}),
    "gemma3, biases, capped logits, no layer without a window": ("gemma3_text", {**GEMMA, "head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 3, "attention_bias": True, "final_logit_softcapping": 2.0}),
    "gemma2": ("gemma2", {**GEMMA, "head_dim": 8, "num_key_value_heads": 2, "attn_implementation": "eager"}),
    "gemma2, sharp caps": ("gemma2", {**GEMMA, **MANY_TO_ONE, "head_dim": 6, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attn_implementation": "eager"}),
    "gemma2, no caps, wide window": ("gemma2", {**GEMMA, "head_dim": 6, "num_key_value_heads": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 256}),
    "granite": ("granite", {**GRANITE, "num_key_value_heads": 2}),
    "granite, tied": ("granite", {**GRANITE, **MANY_TO_ONE, "tie_word_embeddings": True}),
    "granite, biases, heads of 10": ("granite", {**GRANITE, "head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "olmo2, tied": ("olmo2", {**MANY_TO_ONE, "tie_word_embeddings": True}),
    "olmo2, biases, heads of 10": ("olmo2", {"head_dim": 10, "num_key_value_heads": 3, "attention_bias": True}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": 320}),
    "phi3, short factors, tied": ("phi3", {"rope_parameters": {**LONG, "original_max_position_embeddings": 320},
                                           "tie_word_embeddings": True}),
    "phi3, heads in part, long factors": ("phi3", {**MANY_TO_ONE, "rope_parameters": {**LONG, "partial_rotary_factor": 0.7}}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, sequential, tanh": ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new",
                                                "tie_word_embeddings": True}),
    "gpt_neox, no biases, half": ("gpt_neox", {
        "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    }),
    "falcon, 7B": ("falcon", {}),
    "falcon, 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon, 11B, biases": ("falcon", {
        "new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1, "bias": True
    }),
    "falcon, sequential": ("falcon", {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 72}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi, tied": ("phi", {**MANY_TO_ONE, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "phi, shared keys": ("phi", {"num_key_value_heads": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25}}),
    "bloom": ("bloom", {"seq_length": 320}),
    "bloom, untied": ("bloom", {"seq_length": 320, "n_head": 4, "tie_word_embeddings": False}),
    "bloom, 3 heads": ("bloom", {"seq_length": 320, "n_head": 3}),
}  # fmt: skip


# Each family, and each kind of layer, once.
QUICK = ["gpt2", "llama, 8:1, llama3 scaling", "llama, biases", "llama, heads of 64", "mistral", "qwen2", "qwen3, tied, biases",
         "smollm3", "mistral, a window of 16", "qwen2, windows from layer 1", "qwen3, a window in layer 1", "smollm3, windows",
         "gemma3, heads of 10, every second layer", "gemma3, untied, window of 5, linear", "gemma2, sharp caps", "granite",
         "olmo2, biases, heads of 10", "phi3, a window of 16", "phi3, heads in part, long factors",
         "gpt_neox", "gpt_neox, sequential, tanh", "falcon, 7B", "falcon, 40B", "falcon, sequential", "phi", "bloom, 3 heads"]  # fmt: skip
EVERY = points(len(QUICK), *QUICK, *(shape for shape in SHAPES if shape not in QUICK))


def build(shape: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Network]:
    return build_pair(*SHAPES[shape], len(shape), folder, dtype)


@pytest.mark.parametrize("shape", EVERY)
def test_probabilities_and_greedy_answers_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    check_equal(*build(shape, tmp_path))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("shape", points(5, *[*SHAPES][::9], *[*SHAPES][3::9], *[*SHAPES][6::9]))
def test_formats_of_16_and_8_bits_are_near(shape: str, quantize: str, tmp_path: Path) -> None:
    check_near(*build(shape, tmp_path, torch.bfloat16), quantize, 0.05 if quantize == "none" else 0.15)


@pytest.mark.parametrize("shape", points(5, *[*SHAPES][2::9], *[*SHAPES][5::9], *[*SHAPES][8::9]))
def test_adapters_are_those_of_the_merged_model(shape: str, tmp_path: Path) -> None:
    hf, network = build(shape, tmp_path / "model")
    layers = [name for name, module in hf.named_modules() if isinstance(module, torch.nn.Linear) and "head" not in name]
    check_adapter(hf, network, tmp_path / "adapter", tuple({name.rpartition(".")[2] for name in layers}))

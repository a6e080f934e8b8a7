"""The metadata of a GGUF file as the config.json that the same model has in a Hugging Face folder.

What is not understood is refused by name: a switch that is ignored changes the answers without a word. It must not
import torch, nor know tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from models.gguf.gguf_reader import Array, GGUFFile, quoted
from models.sources.checkpoint import CheckpointError, broken

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# Keys after the architecture's name. Any other one may change the computation and is refused.
UNDERSTOOD = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    # These two describe a scaling, which is refused itself.
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
# Switches that change nothing as long as they have one of these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
ROPE_FACTORS = "rope_freqs.weight"
# All Llama 3.x models share these; the converter stores only the factors that follow from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config(file: GGUFFile) -> dict[str, Any]:
    """Return the model's shape with the keys of a Hugging Face config.json. Raises CheckpointError."""
    architecture = architecture_of(file)
    _check_switches(file, architecture)
    shape = _gpt2(file) if architecture == "gpt2" else _llama(file, architecture)
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        **shape,
        "vocab_size": _vocabulary(file, architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_special_tokens(file),
    }


def architecture_of(file: GGUFFile) -> str:
    """Return the file's architecture, one of CLASSES. Raises CheckpointError."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in CLASSES:
        raise CheckpointError(
            f"{file.path} has architecture {quoted(architecture)}, which is not supported. "
            f"Use a file with one of {', '.join(CLASSES)}"
        )
    return architecture


def _check_switches(file: GGUFFile, architecture: str) -> None:
    """Refuse every key that may change the computation in a way that is not known here."""
    metadata = file.metadata
    if metadata.get("general.type", "model") != "model":
        raise _unsupported(file, "general.type", "Use the file of the model itself")
    if metadata.get("split.count", 1) not in (0, 1):
        raise _unsupported(file, "split.count", "Join the parts with llama-gguf-split --merge")
    for key, value in metadata.items():
        switch = key.removeprefix(f"{architecture}.")
        if switch == key or switch in UNDERSTOOD:
            continue
        if value not in NEUTRAL.get(switch, ()):
            raise _unsupported(file, key, "Use a file without it")


def _unsupported(file: GGUFFile, key: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} sets {quoted(key)} to {quoted(file.metadata[key])}, which is not supported. {remedy}"
    )


def _llama(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """Return the shape of a model of the Llama family."""

    def size(key: str, default: int | None = None) -> int:
        return positive(file, f"{architecture}.{key}", default)

    width, n_head = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", width // n_head or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_dim) != head_dim:
            raise _unsupported(file, f"{architecture}.{key}", f"Use a file in which it is the head size, {head_dim}")
    theta = _number(file, f"{architecture}.rope.freq_base", 10000.0)
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": _layers(file, architecture),
        "num_attention_heads": n_head,
        "num_key_value_heads": size("attention.head_count_kv", n_head),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _number(file, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, head_dim, theta) if architecture == "llama" else None,
    }
    if architecture != "qwen2":  # which always has biases at q, k and v
        shape["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture == "llama":
        shape["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return shape


def _gpt2(file: GGUFFile) -> dict[str, Any]:
    return {
        "n_embd": positive(file, "gpt2.embedding_length"),
        "n_inner": positive(file, "gpt2.feed_forward_length"),
        "n_layer": _layers(file, "gpt2"),
        "n_head": positive(file, "gpt2.attention.head_count"),
        "n_positions": positive(file, "gpt2.context_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": _number(file, "gpt2.attention.layer_norm_epsilon"),
    }


def _rope_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the parameters of Llama 3's scaling, of which the file stores only the factor of each frequency."""
    if ROPE_FACTORS not in file.tensors:
        return None
    factors: Array = np.empty(0, np.float32)
    if file.tensors[ROPE_FACTORS].shape == (head_dim // 2,):
        factors = file.tensor(ROPE_FACTORS)
    if len(factors) and np.isfinite(factors).all() and factors.min() > 0:
        scaling = {"rope_type": "llama3", "factor": _plain(factors.max()), **LLAMA3}
        if np.allclose(factors, _llama3_factors(scaling, head_dim, theta), rtol=1e-4, atol=0):
            return scaling
    raise CheckpointError(
        f"{file.path} has {ROPE_FACTORS} with other factors than Llama 3's, which are not supported. "
        "Use the model as a Hugging Face folder"
    )


def _llama3_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """Return by what each frequency is divided (convert_hf_to_gguf.py of llama.cpp, and transformers' llama3)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))


def _layers(file: GGUFFile, architecture: str) -> int:
    """Return the number of blocks; each has tensors, so a larger number is a lie that costs time."""
    n_layer = positive(file, f"{architecture}.block_count")
    if n_layer > len(file.tensors):
        raise broken(file.path, f"{architecture}.block_count is {n_layer}, with {len(file.tensors)} tensors")
    return n_layer


def _vocabulary(file: GGUFFile, architecture: str) -> int:
    """Return the rows of the embedding: the list of tokens may be shorter, and the key may be missing."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise broken(file.path, "it has no token_embd.weight")
    rows = embedding.shape[0]
    if positive(file, f"{architecture}.vocab_size", rows) != rows:
        raise broken(file.path, f"{architecture}.vocab_size is not {rows}, the rows of token_embd.weight")
    return rows


def _special_tokens(file: GGUFFile) -> dict[str, Any]:
    """Return the ids of the tokens that begin and end a text; several may end one."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom"):
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < 2**31):
            raise broken(file.path, f"tokenizer.ggml.{name}_token_id is {quoted(value)}, not a token")
        ids[name] = value
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    return {"bos_token_id": ids["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    """Return the whole number above 0 that `key` holds, or `default`. Raises CheckpointError."""
    value = file.metadata.get(key, default)
    if type(value) is not int or not 1 <= value < 2**31:
        raise broken(file.path, f"{key} is {quoted(value)}, not a whole number above 0")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    number = _plain(value) if isinstance(value, (int, float)) and abs(value) < 1e30 else 0.0
    if not number > 0:
        raise broken(file.path, f"{key} is {quoted(value)}, not a number above 0")
    return number


def _plain(value: float | np.floating[Any]) -> float:
    """Return the shortest decimal that is the same in float32: 1e-05, where the file's bits say 9.999999747e-06."""
    return float(str(np.float32(value)))

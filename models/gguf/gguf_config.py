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

from models.families import gguf_forms
from models.family import GGUF, SIZES
from models.gguf.gguf_reader import Array, GGUFFile, quoted
from models.sources.checkpoint import CheckpointError, broken

# Keys after the architecture's name, beside those of a family. Any other one may change the computation and is refused.
UNDERSTOOD = {
    "vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count",
    # These belong to a scaling, which is refused itself where it is not known.
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
NEEDED = {*SIZES.values()} - {"attention.head_count_kv"}
# Switches that change nothing as long as they have one of these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "pooling_type": (0,),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
    "tensor_data_layout": ("Meta AI original pth", "jploski"),
    "use_parallel_residual": (False,),
}
# What no family here computes, by the key that turns it on.
OUT_OF_SCOPE = {
    "attention.kv_lora_rank": "multi-head latent attention", "ssm.state_size": "state space layers",
    "expert_count": "experts", "vision.block_count": "a vision tower", "audio.block_count": "an audio tower",
}  # fmt: skip
ROPE_FACTORS, LONG, SHORT = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
MOST_FACTORS = 1024
# All Llama 3.x models share these; the converter stores only the factors that follow from them.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config(file: GGUFFile) -> dict[str, Any]:
    """Return the model's shape with the keys of a Hugging Face config.json. Raises CheckpointError."""
    form = form_of(file)
    scaling = _check_switches(file, form)
    values = {"model_type": form.model_type, **form.fixed}
    for name, switch in form.keys.items():
        if (value := _value(file, form, switch)) is not None:
            values[name] = value
    if (n_layer := positive(file, f"{form.architecture}.block_count")) > len(file.tensors):  # a lie that costs time
        raise broken(file.path, f"{form.architecture}.block_count is {n_layer}, with {len(file.tensors)} tensors")
    values |= _heads(file, form)
    if "rope_theta" in form.keys:
        values.setdefault("rope_theta", 10_000.0)
        values["rope_scaling"] = _rope_scaling(file, values, scaling)
    return {
        **values,
        **form.derived(values),
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "vocab_size": _vocabulary(file, form.architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_special_tokens(file),
    }


def form_of(file: GGUFFile) -> GGUF:
    """Return the form in which the file holds its model. Raises CheckpointError."""
    architecture, forms = file.metadata.get("general.architecture"), gguf_forms()
    for form in forms:
        needs = form.needs
        if form.architecture == architecture and (
            not needs or needs in file.tensors or file.metadata.get(f"{architecture}.{needs}")
        ):
            return form
    reason = next(
        (f" ({key} sets {what})" for key, what in OUT_OF_SCOPE.items() if file.metadata.get(f"{architecture}.{key}")),
        "",
    )
    raise CheckpointError(
        f"{file.path} has architecture {quoted(architecture)}, which is not supported{reason}. "
        f"Use a file with one of {', '.join(sorted({form.architecture for form in forms}))}"
    )


def _check_switches(file: GGUFFile, form: GGUF) -> str | None:
    """Refuse every key that may change the computation in a way that is not known here. Return the rotation's scaling."""
    metadata, known = file.metadata, UNDERSTOOD | set(form.keys.values())
    if metadata.get("general.type", "model") != "model":
        raise _unsupported(file, "general.type", "Use the file of the model itself")
    if metadata.get("split.count", 1) not in (0, 1):
        raise _unsupported(file, "split.count", "Join the parts with llama-gguf-split --merge")
    scaling = "longrope" if LONG in file.tensors else metadata.get(f"{form.architecture}.rope.scaling.type")
    if "rope_theta" in form.keys and scaling in ("linear", "longrope"):
        known |= {"rope.scaling.type", f"rope.scaling.{'factor' if scaling == 'linear' else 'attn_factor'}"}
    for key, value in metadata.items():
        switch = key.removeprefix(f"{form.architecture}.")
        if switch != key and switch not in known and value not in NEUTRAL.get(switch, ()):
            raise _unsupported(file, key, "Use a file without it")
    return scaling


def _unsupported(file: GGUFFile, key: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path} sets {quoted(key)} to {quoted(file.metadata[key])}, which is not supported. {remedy}"
    )


def _value(file: GGUFFile, form: GGUF, switch: str) -> bool | float | None:
    """Return what the file says of a switch, None for one that is missing and may be, or is off."""
    key = f"{form.architecture}.{switch}"
    value, needed = file.metadata.get(key), switch in NEEDED or switch.endswith("epsilon")
    if isinstance(value, bool) or (not needed and (value is None or value in NEUTRAL.get(switch, ()))):
        return value if isinstance(value, bool) else None
    return positive(file, key) if isinstance(value, int) else _number(file, key)


def _heads(file: GGUFFile, form: GGUF) -> dict[str, Any]:
    """Return the size of heads and, for a family in which they may rotate in part, this part."""
    width, n_head = (
        positive(file, f"{form.architecture}.{SIZES[name]}") for name in ("hidden_size", "num_attention_heads")
    )
    head_dim = positive(file, f"{form.architecture}.attention.key_length", width // n_head or 1)
    part = next((name for name, switch in form.keys.items() if switch == "rope.dimension_count"), None)
    for switch in ("attention.value_length", "rope.dimension_count"):
        size = positive(file, f"{form.architecture}.{switch}", head_dim)
        if size != head_dim and (part is None or switch != "rope.dimension_count"):
            raise _unsupported(
                file, f"{form.architecture}.{switch}", f"Use a file in which it is the head size, {head_dim}"
            )
    # The quotient may be rounded down, but the product with the head size is, too.
    return {"head_dim": head_dim} | (
        {} if part is None else {part: size / head_dim if size == head_dim else math.nextafter(size / head_dim, 1)}
    )


def _rope_scaling(file: GGUFFile, values: Mapping[str, Any], kind: str | None) -> dict[str, Any] | None:
    """Return how the rotation is scaled; of Llama 3's scaling, the file stores only the factor of each frequency."""
    head_dim, keys = values["head_dim"], f"{file.metadata['general.architecture']}.rope.scaling"
    if kind == "linear":
        return {"rope_type": kind, "factor": _number(file, f"{keys}.factor")}
    if kind == "longrope":
        lists = {
            name: [_plain(x) for x in _factors(file, key)]
            for name, key in (("long_factor", LONG), ("short_factor", SHORT))
        }
        original = positive(file, f"{keys}.original_context_length")
        stretch = {"attention_factor": _number(file, f"{keys}.attn_factor", 1.0)}
        return {"rope_type": kind, "original_max_position_embeddings": original, **lists, **stretch}
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = _factors(file, ROPE_FACTORS)
    if len(factors) == head_dim // 2 and np.isfinite(factors).all() and factors.min() > 0:
        scaling = {"rope_type": "llama3", "factor": _plain(factors.max()), **LLAMA3}
        if np.allclose(factors, _llama3_factors(scaling, head_dim, values["rope_theta"]), rtol=1e-4, atol=0):
            return scaling
    raise CheckpointError(
        f"{file.path} has {ROPE_FACTORS} with other factors than Llama 3's, which are not supported. "
        "Use the model as a Hugging Face folder"
    )


def _factors(file: GGUFFile, key: str) -> Array:
    """Return the factors of frequencies, none for a tensor that is missing or is none of factors."""
    stored = file.tensors.get(key)
    return (
        file.tensor(key)
        if stored and len(stored.shape) == 1 and stored.shape[0] <= MOST_FACTORS
        else np.empty(0, np.float32)
    )


def _llama3_factors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """Return by what each frequency is divided (convert_hf_to_gguf.py of llama.cpp, and transformers' llama3)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))


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

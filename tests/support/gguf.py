"""Small GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.checkpoints import transformers

Tensors = Mapping[str, tuple[npt.NDArray[Any], Kind]]

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA_KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}


# general.architecture where it is not config.json's model_type.
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "phi": "phi2",
                 "gpt_neox": "gptneox"}  # fmt: skip
INTERLEAVED = ("llama", "mistral", "mixtral", "granite", "smollm3")  # in which the converter reorders queries and keys


def write(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write a GGUF file; a key without a group gets the architecture's, and its value's type becomes GGUF's."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(name, value)
    for name, (blocks, kind) in tensors.items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(path: Path, changes: Mapping[str, Any] | None = None, extra: Tensors | None = None) -> Path:
    """Write a file with the keys of a small llama, and its embedding alone."""
    embedding = np.ones((61, 32), np.float32)
    keys = {**LLAMA_KEYS, "vocab_size": 61, **(changes or {})}
    layers = {f"blk.{n}.attn_norm.weight": (np.ones(32, np.float32), Kind.F32) for n in range(2)}
    return write(path, "llama", keys, {"token_embd.weight": (embedding, Kind.F32), **layers, **(extra or {})})


def random_model(architecture: str, **changes: Any) -> Any:
    """Return a small model of transformers with random tensors: none can be left out unnoticed."""
    torch.manual_seed(7)
    hf = transformers()
    if architecture == "gpt2":
        shape = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 80}
        shape |= {"bos_token_id": 1, "eos_token_id": 2}
    else:
        shape = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(architecture, **{**shape, **changes}))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


def converted(
    path: Path,
    model: Any,
    keys: Mapping[str, Any],
    more: Tensors | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Path:
    """Write `model` with all tensors in F32, in llama.cpp's names and order of rows.

    Matrices whose name has a part of `kinds` have that kind, the last one of several.
    """
    config, tensors = model.config, dict(more or {})
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for full, part in stored_as(name, value, config):
            stored = str(names.get_name(full, (".weight", ".bias")))
            matched = [kind for part, kind in (kinds or {}).items() if part in stored] if value.ndim > 1 else []
            kind = matched[-1] if matched else Kind.F32
            numbers = part.contiguous().numpy()
            tensors[stored] = (numbers if kind == Kind.F32 else gguf.quants.quantize(numbers, kind), kind)
    return write(path, architecture, keys, tensors)


def stored_as(name: str, value: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what llama.cpp's converter makes of a tensor, by names that the gguf package knows."""
    family, width, n_head = config.model_type, config.hidden_size, config.num_attention_heads
    if family == "bloom":
        name = name.removeprefix("transformer.")
    if family in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        value = permuted(value, n_head if "q_proj" in name else config.num_key_value_heads)
    if family == "gpt2" and value.ndim == 2 and ".h." in name:
        value = value.T
    if family.startswith("gemma") and name.endswith("norm.weight"):
        value = value + 1
    if "query_key_value" in name:
        new, alone = (getattr(config, switch, False) for switch in ("new_decoder_architecture", "multi_query"))
        n_kv = config.num_kv_heads if new else 1 if alone else n_head
        groups = value.reshape(n_kv, n_head // n_kv + 2, width // n_head, *value.shape[1:])
        parts = (groups[:, :-2], groups[:, [-2]], groups[:, [-1]])
        value = torch.cat([part.reshape(-1, *value.shape[1:]) for part in parts])
    if name.endswith("gate_up_proj") and value.ndim == 3:
        gate, up = value.chunk(2, 1)
        return [(name.replace("gate_up_proj", f"{part}_proj.weight"), x) for part, x in (("gate", gate), ("up", up))]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, value)]


def permuted(rows: torch.Tensor, n_head: int) -> torch.Tensor:
    """Return the rows of q or k as the converter of llama.cpp stores them for its interleaved rotation."""
    return rows.reshape(n_head, 2, rows.shape[0] // n_head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

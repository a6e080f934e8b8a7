"""A GGUF file as a Hugging Face checkpoint: its config, and its tensors in float32 under their names there.

What is behind need not know that the weights came in one file of blocks. It must not import torch, nor know tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from models.gguf.gguf_config import ROPE_FACTORS, architecture_of, config, positive
from models.gguf.gguf_reader import Array, GGUFFile, StoredBlocks, quoted, read
from models.sources.checkpoint import CheckpointError, broken
from models.tensors import Shapes

__all__ = ["GGUFFile", "StoredBlocks", "config", "hf_kinds", "hf_shapes", "hf_tensors", "read"]

AnyArray = TypeVar("AnyArray", npt.NDArray[np.float32], npt.NDArray[np.uint8])

# Parts of a block, as GGUF and as Hugging Face name them.
LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_OUTSIDE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GPT2_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out)


def hf_shapes(file: GGUFFile) -> Shapes:
    """Return name and shape of all tensors as a Hugging Face checkpoint has them, reading none."""
    shapes = {name: file.tensors[key].shape for key, name in _hf_names(file).items()}
    return {name: shape[::-1] if name.endswith(GPT2_TRANSPOSED) else shape for name, shape in shapes.items()}


def hf_kinds(file: GGUFFile) -> dict[str, str]:
    """Return the kind, such as "Q4_0", of each tensor by its name in a Hugging Face checkpoint."""
    return {name: file.tensors[key].kind for key, name in _hf_names(file).items()}


def hf_tensors(file: GGUFFile, as_blocks: Collection[str] = ()) -> Iterator[tuple[str, Array | StoredBlocks]]:
    """Yield name and values of all tensors as a Hugging Face checkpoint has them, one in memory at a time.

    Matrices `as_blocks`, by their names there, come as rows of blocks (out, bytes), whatever their layout there.
    """
    architecture = architecture_of(file)
    heads = {}
    if architecture == "llama":
        heads["q_proj"] = positive(file, "llama.attention.head_count")
        heads["k_proj"] = positive(file, "llama.attention.head_count_kv", heads["q_proj"])
    for key, name in _hf_names(file).items():
        n_head = heads.get(name.split(".")[-2])
        if name in as_blocks:
            blocks = file.blocks(key)
            yield name, blocks if n_head is None else blocks._replace(data=_halves(blocks.data, n_head, file, key))
            continue
        values = file.tensor(key)
        if n_head is not None:
            values = _halves(values, n_head, file, key)
        yield name, np.ascontiguousarray(values.T) if name.endswith(GPT2_TRANSPOSED) else values


def _halves(values: AnyArray, n_head: int, file: GGUFFile, key: str) -> AnyArray:
    """Undo the converter's order of a head's rows, (pair, 2), for (2, pair), which rotates halves."""
    if values.shape[0] % (2 * n_head):
        raise broken(file.path, f"{quoted(key)} has {values.shape[0]} rows, not a multiple of two for {n_head} heads")
    pairs = values.reshape(n_head, -1, 2, *values.shape[1:])  # (head, pair, 2, in)
    halves: AnyArray = pairs.swapaxes(1, 2).reshape(values.shape)
    return halves


def _hf_names(file: GGUFFile) -> dict[str, str]:
    """Return the Hugging Face name of each tensor, refusing a tensor that the architecture does not have."""
    architecture = architecture_of(file)
    if architecture == "gpt2":
        layers, block, outside = "transformer.h", GPT2_BLOCK, GPT2_OUTSIDE
    else:
        layers, block, outside = "model.layers", LLAMA_BLOCK, LLAMA_OUTSIDE
    names = {}
    for key in file.tensors:
        if key == ROPE_FACTORS and architecture == "llama":
            continue  # it is part of the config
        match = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]*)\.)?([a-z_]+)\.(weight|bias)", key)
        parts = block if match and match[1] else outside
        if match is None or match[2] not in parts:
            raise CheckpointError(
                f"{file.path} has the tensor {quoted(key)}, which is not supported in architecture {architecture}. "
                "Use a file of the plain model"
            )
        prefix = f"{layers}.{match[1]}." if match[1] else ""
        names[key] = f"{prefix}{parts[match[2]]}.{match[3]}"
    return names

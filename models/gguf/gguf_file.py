"""A GGUF file as a checkpoint: its config, and its tensors in float32, each expert's apart.

What is behind need not know that the weights came in one file of blocks. It must not import torch, nor know tokenizers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from models.family import Layout
from models.gguf.gguf_config import config, form_of
from models.gguf.gguf_reader import Array, GGUFFile, StoredBlocks, StoredTensor, read
from models.tensors import Shapes

__all__ = ["GGUFFile", "StoredBlocks", "config", "kinds", "layout", "read", "shapes", "tensors"]

MOST_EXPERTS = 4096


def layout(file: GGUFFile) -> Layout:
    """Return how the file names its tensors. Raises CheckpointError."""
    return form_of(file).layout


def shapes(file: GGUFFile) -> Shapes:
    """Return name and shape of all tensors, reading none."""
    return {name: stored.shape[-2:] for key, stored in file.tensors.items() for name in _names(key, stored)}


def kinds(file: GGUFFile) -> dict[str, str]:
    """Return name and kind, such as "Q4_0", of all tensors."""
    return {name: stored.kind for key, stored in file.tensors.items() for name in _names(key, stored)}


def tensors(file: GGUFFile, as_blocks: Collection[str] = ()) -> Iterator[tuple[str, Array | StoredBlocks]]:
    """Yield name and values of all tensors, reading one at a time. Those `as_blocks` come as rows of blocks (out, bytes)."""
    for key, stored in file.tensors.items():
        names = _names(key, stored)
        if names[0] in as_blocks:
            kind, data = file.blocks(key)
            yield from ((name, StoredBlocks(kind, part)) for name, part in zip(names, np.split(data, len(names))))
        elif names == [key]:
            yield key, file.tensor(key)
        else:
            yield from zip(names, file.tensor(key))


def _names(key: str, stored: StoredTensor) -> list[str]:
    """Return the names of the matrices in a tensor: those of all experts are stored as one, (experts, out, in)."""
    if len(stored.shape) != 3 or stored.shape[0] > MOST_EXPERTS:
        return [key]
    module, _, leaf = key.rpartition(".")
    return [f"{module}.{expert}.{leaf}" for expert in range(stored.shape[0])]

"""A `ResolvedModel` becomes a `GPT` with weights, read tensor by tensor straight into the wanted dtype.

It must not know tokenizers, HTTP, batching or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models import checkpoint
from models.catalog import ResolvedModel
from models.gpt2 import GPT, GPTConfig

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # stored (in, out)
DUMMY_POOL = 2**20 + 7  # odd, so that the rows of a tiled matrix differ


def load(resolved: ResolvedModel, dtype: torch.dtype | str = "float32", seed: int = 0) -> GPT:
    """Return the model on the CPU in `dtype`, ready for inference (eval mode, no gradients).

    At most two tensors exist in memory beside the model itself. Random weights depend on `seed` alone. Raises
    CheckpointError when the files do not hold what the config says.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):  # shapes without memory; every tensor is put in place below
        gpt = GPT(GPTConfig(**resolved.config))
    if resolved.folder is None:
        _fill(gpt, dtype, seed)
    else:
        _read(gpt, resolved.config, resolved.folder, dtype)
    return gpt.eval().requires_grad_(False)


def _read(gpt: GPT, config: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Put the tensors of `folder` into `gpt`, converted to `dtype` one by one."""
    expected = checkpoint.expected_shapes({**config, "tie_word_embeddings": False})
    stored: checkpoint.Shapes = {}
    head = None
    for name, tensor in _tensors(folder):
        stored[name] = tuple(tensor.shape)
        if expected.get(name) != stored[name]:
            continue  # check_shapes below names it, together with all the others
        source = tensor.to(dtype)  # convert before transposing: torch is slow when it does both at once
        source = source.T if name.endswith(TRANSPOSED) else source
        value = source.clone(memory_format=torch.contiguous_format)
        if name == "lm_head.weight":
            head = value
        else:
            _put(gpt, f"transformer.{name}", value)
    checkpoint.check_shapes(stored, config, folder)
    _join_head(gpt, head)


def _join_head(gpt: GPT, head: Tensor | None) -> None:
    """Tie the head to `wte`, or keep it separate where the checkpoint does, as transformers does."""
    wte = gpt.transformer.wte.weight
    if head is not None and wte.is_meta:  # a tied checkpoint that stores the matrix under the head's name
        _put(gpt, "transformer.wte.weight", head)
    elif head is not None and not (gpt.config.tie_word_embeddings and torch.equal(head, wte)):
        gpt.config = replace(gpt.config, tie_word_embeddings=False)
        _put(gpt, "lm_head.weight", head)
        return
    gpt.lm_head.weight = gpt.transformer.wte.weight


def _put(gpt: GPT, name: str, value: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(gpt.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield plain name and tensor of everything the checkpoint in `folder` stores.

    Each tensor is read from a mapping of its own: one mapping for all would keep every page that was read resident,
    and the peak would be twice the model.
    """
    for path in checkpoint.weight_files(folder):
        try:
            for name in checkpoint.safetensors_shapes(path):
                with safe_open(path, framework="pt") as file:
                    yield checkpoint.plain_name(name), file.get_tensor(name)
        except SafetensorError as error:
            raise checkpoint.broken(path, error) from error


def _fill(gpt: GPT, dtype: torch.dtype, seed: int) -> None:
    """Fill `gpt` as `GPT.init_weights` would, but by copying one pool of random numbers.

    Drawing every number of gpt2-medium takes some 5 seconds; copying takes a fraction of one.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(DUMMY_POOL, generator=generator)
    residual = 0.02 / (2 * gpt.config.n_layer) ** 0.5
    scaled = {std: (pool * std).to(dtype) for std in (0.02, residual)}
    offset = 0
    for name, parameter in list(gpt.named_parameters()):
        if name.endswith("bias"):
            value = torch.zeros(parameter.shape, dtype=dtype)
        elif ".ln_" in name:
            value = torch.ones(parameter.shape, dtype=dtype)
        else:
            numbers = scaled[residual if name.endswith("c_proj.weight") else 0.02]
            value = torch.empty(parameter.shape, dtype=dtype)
            flat, done = value.view(-1), 0
            while done < len(flat):  # each tensor begins elsewhere in the pool
                n = min(len(flat) - done, DUMMY_POOL - offset)
                flat[done : done + n] = numbers[offset : offset + n]
                done, offset = done + n, (offset + n) % DUMMY_POOL
        _put(gpt, name, value)
    if gpt.config.tie_word_embeddings:
        gpt.lm_head.weight = gpt.transformer.wte.weight

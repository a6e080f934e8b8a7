"""A `ResolvedModel` becomes a `Network`, read tensor by tensor straight into the wanted dtype and layout.

It must not know a single family, tokenizers, HTTP, batching or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models import checkpoint, families, gguf_file, tensors
from models.architecture import Architecture
from models.catalog import ResolvedModel
from models.family import Layout
from models.gpt2 import GPT
from models.network import Block, Network, Norm, Projection
from models.tensors import Place

DUMMY_POOL = 2**20 + 7  # odd, so that the rows of a tiled matrix differ
NORMS = ("norm_1", "norm_2", "q_norm", "k_norm", "norm")
RESIDUAL = ("attn_proj", "mlp_proj")
EMBEDDING, POSITIONS, HEAD = (Place(None, part, "weight") for part in ("embedding", "positions", "head"))


def load(resolved: ResolvedModel, dtype: torch.dtype | str = "float32", seed: int = 0) -> Network:
    """Return the model on the CPU in `dtype`.

    At most two tensors exist in memory beside the model itself. Random weights depend on `seed` alone. Raises
    CheckpointError when the files do not hold what the config says.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    config, layout = resolved.architecture, families.family_of(resolved.config).layout
    if resolved.path is None:
        return _assembled(config, _random(config, layout, dtype, seed))
    stored: tensors.Shapes = {}
    found = _read(config, layout, resolved.path, dtype, stored)
    checkpoint.check_shapes(stored, resolved.config, resolved.path)
    return _assembled(config, found)


def load_gpt(resolved: ResolvedModel, dtype: torch.dtype | str = "float32", seed: int = 0) -> GPT:
    """Return a GPT-2 as a module of PyTorch, ready for inference. Raises ValueError for another family."""
    return GPT.from_network(load(resolved, dtype, seed))


def _read(
    config: Architecture, layout: Layout, path: Path, dtype: torch.dtype, stored: tensors.Shapes
) -> dict[Place, Tensor]:
    """Return the engine's tensors from the files at `path`, and note in `stored` the shape of all that is there."""
    pieces = tensors.pieces(replace(config, tied=False), layout)  # a tied model may store a head, too
    found: dict[Place, Tensor] = {}
    for name, tensor in _tensors(path, layout):
        stored[name] = tuple(tensor.shape)
        piece = pieces.get(name)
        if piece is None or piece.shape != stored[name]:
            continue  # check_shapes names it, together with all the others
        # Convert before transposing: torch is slow when it does both at once.
        source = tensor.to(dtype).T if piece.transposed else tensor
        if piece.place not in found:
            found[piece.place] = torch.empty((piece.rows, *source.shape[1:]), dtype=dtype)
        found[piece.place][piece.start : piece.start + len(source)].copy_(source)
    return found


def _tensors(path: Path, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield plain name and tensor of every weight at `path`.

    Each tensor is read from a mapping of its own: one mapping for all would keep every page that was read resident,
    and the peak would be twice the model.
    """
    if path.is_file():
        for name, values in gguf_file.hf_tensors(gguf_file.read(path)):
            if (plain := layout.plain_name(name)) is not None:
                yield plain, torch.from_numpy(values)
        return
    for file in checkpoint.weight_files(path):
        try:
            for name in [name for name, _, _ in checkpoint.safetensors_headers(file)]:
                if (plain := layout.plain_name(name)) is not None:
                    with safe_open(file, framework="pt") as opened:
                        yield plain, opened.get_tensor(name)
        except SafetensorError as error:
            raise checkpoint.broken(file, error) from error


def _assembled(config: Architecture, found: dict[Place, Tensor]) -> Network:
    """Return the network of these tensors, whose head is the embedding where both are equal, as in transformers."""
    embedding, head = found.pop(EMBEDDING, None), found.pop(HEAD, None)
    if embedding is None:  # a tied checkpoint that stores the matrix under the head's name
        embedding = head
    assert embedding is not None
    if head is None or (config.tied and torch.equal(head, embedding)):
        head = embedding
    config = replace(config, tied=head is embedding)
    return Network(
        config=config,
        embedding=embedding,
        positions=found.pop(POSITIONS, None),
        blocks=[_block(config, layer, found) for layer in range(config.n_layer)],
        norm=Norm(*_pair(None, "norm", found)),
        head=head,
    )


def _block(config: Architecture, layer: int, found: dict[Place, Tensor]) -> Block:
    linear = {part: Projection(*_pair(layer, part, found)) for part in ("qkv", "attn_proj", "fc", "mlp_proj")}
    norms = [Norm(*_pair(layer, part, found)) for part in ("norm_1", "norm_2")]
    heads = [Norm(*_pair(layer, part, found)) if config.qk_norm else None for part in ("q_norm", "k_norm")]
    return Block(norms[0], linear["qkv"], linear["attn_proj"], norms[1], linear["fc"], linear["mlp_proj"], *heads)


def _pair(layer: int | None, part: str, found: dict[Place, Tensor]) -> tuple[Tensor, Tensor | None]:
    return found.pop(Place(layer, part, "weight")), found.pop(Place(layer, part, "bias"), None)


def _random(config: Architecture, layout: Layout, dtype: torch.dtype, seed: int) -> dict[Place, Tensor]:
    """Return tensors as GPT-2 initializes them, but copied from one pool of random numbers.

    Drawing every number of gpt2-medium takes some 5 seconds; copying takes a fraction of one.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(DUMMY_POOL, generator=generator)
    plain, residual = ((pool * std).to(dtype) for std in (0.02, 0.02 / (2 * config.n_layer) ** 0.5))
    found: dict[Place, Tensor] = {}
    offset = 0
    for piece in tensors.pieces(config, layout).values():
        if piece.place in found:
            continue
        columns = piece.shape[:1] if piece.transposed else piece.shape[1:]
        value = found[piece.place] = torch.empty((piece.rows, *columns), dtype=dtype)
        if piece.place.leaf == "bias" or piece.place.part in NORMS:
            value.fill_(piece.place.leaf == "weight")
            continue
        numbers = residual if piece.place.part in RESIDUAL else plain
        flat, done = value.view(-1), 0
        while done < len(flat):  # each tensor begins elsewhere in the pool
            n = min(len(flat) - done, DUMMY_POOL - offset)
            flat[done : done + n] = numbers[offset : offset + n]
            done, offset = done + n, (offset + n) % DUMMY_POOL
    return found

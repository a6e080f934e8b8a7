"""A `ResolvedModel` becomes a `Network`, read tensor by tensor straight into the wanted dtype and layout.

It must not know a single family, tokenizers, HTTP, batching or scheduling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models import families, tensors
from models.architecture import Architecture
from models.family import Layout
from models.gguf import gguf_file
from models.gguf.block_matrix import BlockMatrix, Weight
from models.gguf.gguf_file import GGUFFile
from models.gpt2 import GPT
from models.network import Block, Network, Norm, Projection
from models.sources import checkpoint
from models.sources.resolved import ResolvedModel
from models.tensors import Piece, Place

DUMMY_POOL = 2**20 + 7  # odd, so that the rows of a tiled matrix differ
NORMS = ("norm_1", "norm_2", "q_norm", "k_norm", "attn_norm", "mlp_norm", "norm", "embedding_norm")
RESIDUAL = ("attn_proj", "mlp_proj")
LINEAR = ("qkv", "attn_proj", "fc", "mlp_proj", "embedding", "head")
EMBEDDING, POSITIONS, HEAD = (Place(None, part, "weight") for part in ("embedding", "positions", "head"))


def load(
    resolved: ResolvedModel, dtype: torch.dtype | str = "float32", seed: int = 0, as_blocks: Collection[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Network:  # fmt: skip
    """Return the model on the CPU in `dtype`.

    Weights of linear layers that a GGUF file has in a kind of `as_blocks` stay as they are. At most two tensors exist
    in memory beside the model itself. `progress` gets the number of tensors read so far, and of all. Random weights
    depend on `seed` alone. Raises CheckpointError when the files do not hold what the config says.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    config, path = resolved.architecture, resolved.path
    if path is None:
        return _assembled(config, _random(config, families.family_of(resolved.config).layout, dtype, seed), {})
    source = gguf_file.read(path) if path.is_file() else path
    layout = families.family_of(resolved.config).layout if isinstance(source, Path) else gguf_file.layout(source)
    stored: tensors.Shapes = {}
    found, blocks = _read(config, layout, source, dtype, stored, as_blocks, progress)
    checkpoint.check_shapes(stored, resolved.config, layout, path)
    return _assembled(config, found, blocks)


def stored_kinds(resolved: ResolvedModel, kinds: Collection[str]) -> set[str]:
    """Return those of these kinds of blocks that `load` leaves as they are in the model's file."""
    path = resolved.path
    if path is None or not path.is_file():
        return set()
    file = gguf_file.read(path)
    return set(_kept(file, _pieces(resolved.architecture, gguf_file.layout(file)), kinds).values())


def load_gpt(resolved: ResolvedModel, dtype: torch.dtype | str = "float32", seed: int = 0) -> GPT:
    """Return a GPT-2 as a module of PyTorch, ready for inference. Raises ValueError for another family."""
    return GPT.from_network(load(resolved, dtype, seed))


def _read(
    config: Architecture,
    layout: Layout,
    source: Path | GGUFFile,
    dtype: torch.dtype,
    stored: tensors.Shapes,
    as_blocks: Collection[str],
    progress: Callable[[int, int], None],
) -> tuple[dict[Place, Tensor], dict[Place, BlockMatrix]]:
    """Return the engine's tensors from `source`, apart from these the matrices in blocks.

    Notes in `stored` the shape of all that is there.
    """
    pieces = _pieces(config, layout)
    kept = {} if isinstance(source, Path) else _kept(source, pieces, as_blocks)
    found: dict[Place, Tensor] = {}
    blocks: dict[Place, BlockMatrix] = {}
    total = len(tensors.pieces(config, layout))
    for number, (name, tensor) in enumerate(_tensors(source, layout, kept), 1):
        progress(min(number, total), total)  # there may be a head although it is tied
        piece = pieces.get(name)
        stored[name] = tuple(tensor.shape)
        if piece is None or piece.shape != stored[name]:
            continue  # check_shapes names it, together with all the others
        if isinstance(tensor, BlockMatrix):
            matrix = replace(tensor, dtype=dtype, data=tensor.data[slice(None) if piece.order is None else piece.order])
            if piece.place == EMBEDDING:  # tokens are looked up in `dtype`; a tied head stays in blocks
                found[EMBEDDING] = matrix.dequantized()
                if config.tied:
                    blocks[HEAD] = matrix
            else:
                _fill(blocks, piece, matrix)
            continue
        # Convert before transposing: torch is slow when it does both at once.
        values = tensor.to(dtype).T if piece.transposed else tensor
        if piece.order is not None:
            values = values[piece.order]
        if piece.scale != 1 or piece.offset:
            values = values.float() * piece.scale + piece.offset
        wide = torch.float32 if piece.offset else dtype  # a sum has more digits than its parts
        if piece.place not in found:
            found[piece.place] = torch.empty((piece.rows, *values.shape[1:]), dtype=wide)
        found[piece.place][piece.start : piece.start + len(values)].copy_(values)
    return found, blocks


def _pieces(config: Architecture, layout: Layout) -> dict[str, Piece]:
    """Return the place of every tensor that files may hold; those of a tied model may hold a head, too."""
    return tensors.pieces(replace(config, tied=False), layout)


def _kept(file: GGUFFile, pieces: dict[str, Piece], as_blocks: Collection[str]) -> dict[str, str]:
    """Return the kind of each weight that stays in blocks, by its name.

    The parts of one matrix, such as queries, keys and values, do so if they have one kind.
    """
    kinds: dict[Place, set[str]] = defaultdict(set)
    stored = {name: kind for name, kind in gguf_file.kinds(file).items() if name in pieces}
    for name, kind in stored.items():
        kinds[pieces[name].place].add(kind)
    return {
        name: kind
        for name, kind in stored.items()
        if pieces[name].place.part in LINEAR and pieces[name].place.leaf == "weight" and pieces[name].scale == 1
        if len(kinds[pieces[name].place]) == 1 and kind in as_blocks
    }


def _fill(blocks: dict[Place, BlockMatrix], piece: Piece, part: BlockMatrix) -> None:
    """Put rows of blocks where they belong."""
    if piece.rows == len(part.data):
        blocks[piece.place] = part
        return
    if piece.place not in blocks:
        data = torch.empty((piece.rows, part.data.shape[1]), dtype=torch.uint8)
        blocks[piece.place] = replace(part, data=data)
    blocks[piece.place].data[piece.start : piece.start + len(part.data)].copy_(part.data)


def _tensors(source: Path | GGUFFile, layout: Layout, kept: Collection[str]) -> Iterator[tuple[str, Weight]]:
    """Yield plain name and tensor of every weight of `source`.

    Each tensor is read from a mapping of its own: one mapping for all would keep every page that was read resident,
    and the peak would be twice the model.
    """
    if not isinstance(source, Path):
        for name, values in gguf_file.tensors(source, kept):
            if (plain := layout.plain_name(name)) is None:
                continue
            if isinstance(values, gguf_file.StoredBlocks):
                yield plain, BlockMatrix.stored(values.kind, torch.from_numpy(values.data))
            else:
                yield plain, torch.from_numpy(values)
        return
    for file in checkpoint.weight_files(source):
        try:
            for name in [name for name, _, _ in checkpoint.safetensors_headers(file)]:
                if (plain := layout.plain_name(name)) is not None:
                    with safe_open(file, framework="pt") as opened:
                        yield plain, opened.get_tensor(name)
        except SafetensorError as error:
            raise checkpoint.broken(file, error) from error


def _assembled(config: Architecture, found: dict[Place, Tensor], blocks: dict[Place, BlockMatrix]) -> Network:
    """Return the network of these tensors, whose head is the embedding where both are equal, as in transformers."""
    embedding, stored = found.pop(EMBEDDING, None), found.pop(HEAD, None)
    if embedding is None:  # a tied checkpoint that stores the matrix under the head's name
        embedding = stored
    assert embedding is not None
    if stored is None or (config.tied and torch.equal(stored, embedding)):
        stored = embedding
    head: Weight = blocks.pop(HEAD, stored)
    tied = config.tied if isinstance(head, BlockMatrix) else head is embedding
    config = replace(config, tied=tied)
    return Network(
        config=config,
        embedding=embedding,
        positions=found.pop(POSITIONS, None),
        blocks=[_block(config, layer, found, blocks) for layer in range(config.n_layer)],
        norm=_norm(None, "norm", found),
        head=head,
        embedding_norm=_norm(None, "embedding_norm", found) if config.embedding_norm else None,
        head_bias=found.pop(HEAD._replace(leaf="bias"), None),
    )


def _block(config: Architecture, layer: int, found: dict[Place, Tensor], blocks: dict[Place, BlockMatrix]) -> Block:
    def linear(part: str) -> Projection:
        place = Place(layer, part, "weight")
        weight = blocks.pop(place) if place in blocks else found.pop(place)
        return Projection(weight, found.pop(place._replace(leaf="bias"), None))

    heads = [_norm(layer, part, found) if config.qk_norm else None for part in ("q_norm", "k_norm")]
    behind = [_norm(layer, part, found) for part in ("attn_norm", "mlp_norm") if config.both_norms]
    before_attention = _norm(layer, "norm_1", found)
    before_mlp = before_attention if config.one_norm else _norm(layer, "norm_2", found)
    before, router = (
        (before_attention, linear("qkv"), linear("attn_proj"), before_mlp),
        config.experts and linear("router"),
    )
    return Block(*before, linear("fc"), linear("mlp_proj"), *heads, *behind, router=router or None)


def _norm(layer: int | None, part: str, found: dict[Place, Tensor]) -> Norm:
    return Norm(found.pop(Place(layer, part, "weight")), found.pop(Place(layer, part, "bias"), None))


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

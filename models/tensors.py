"""Which stored tensor goes where: a family's names and an architecture's sizes give name, shape and place of each.

It must not import torch, nor know a single family or the format of a file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from models.architecture import Architecture
from models.family import Layout

Shapes = dict[str, tuple[int, ...]]
EXPERT_PARTS = ("fc", "mlp_proj")  # stored apart for each expert of a mixture, whose number is in their names


class Place(NamedTuple):
    """A tensor of the engine: a field of `models.network.Block` in layer `layer`, or of `Network` without one."""

    layer: int | None
    part: str
    leaf: str


class Piece(NamedTuple):
    """One stored tensor: its shape in the file, and the rows of the engine's tensor that it fills.

    rows: of the whole tensor in the engine. transposed: stored as (in, out). scale: the engine's numbers / the file's.
    offset: added to the file's numbers.
    order: for each row in the engine, the row of the stored tensor, None where they are the same.
    """

    shape: tuple[int, ...]
    place: Place
    start: int
    rows: int
    transposed: bool
    scale: float
    order: list[int] | None
    offset: float


def pieces(config: Architecture, layout: Layout) -> dict[str, Piece]:
    """Return every tensor of a checkpoint by its name without prefix; a tied head is not among them."""
    C, V = config.n_embd, config.vocab_size
    biased_norm, scales, order = config.norm == "layer", dict(config.scales), _head_order(config, layout)
    found: dict[str, Piece] = {}

    def add(name: str, place: Place, columns: int | None, start: int, count: int, rows: int) -> None:
        transposed = layout.transposed and columns is not None and place.layer is not None
        shape = (count,) if columns is None else (columns, count) if transposed else (count, columns)
        own = [row - start for row in order[start : start + count]] if order and place.part == "qkv" else None
        scale = scales.get(place.part, 1.0)
        offset = layout.norm_offset if columns is None and place.leaf == "weight" else 0.0
        found[f"{name}.{place.leaf}"] = Piece(shape, place, start, rows, transposed, scale, own, offset)

    add(layout.embedding, Place(None, "embedding", "weight"), C, 0, V, V)
    if config.rope is None and layout.positions is not None and not config.alibi:
        add(layout.positions, Place(None, "positions", "weight"), C, 0, config.block_size, config.block_size)
    for layer in range(config.n_layer):
        for part, (counts, columns, bias) in _block(config).items():
            names = layout.parts[part]
            if config.experts and part in EXPERT_PARTS:
                names = tuple(name.format(expert) for expert in range(config.experts) for name in names)
            if len(names) == 1:  # stored as one tensor, like GPT-2's c_attn
                counts = (sum(counts),)
            start = 0
            for name, count in zip(names, counts):
                full = layout.layer.format(layer) + name
                add(full, Place(layer, part, "weight"), columns, start, count, sum(counts))
                if bias:
                    add(full, Place(layer, part, "bias"), None, start, count, sum(counts))
                start += count
    for leaf in ("weight", "bias") if biased_norm else ("weight",):
        add(layout.norm, Place(None, "norm", leaf), None, 0, C, C)
        if config.embedding_norm:
            add(layout.embedding_norm, Place(None, "embedding_norm", leaf), None, 0, C, C)
    if config.head_bias:
        add(layout.head, Place(None, "head", "bias"), None, 0, V, V)
    if not config.tied:
        add(layout.head, Place(None, "head", "weight"), C, 0, V, V)
    return found


def _head_order(config: Architecture, layout: Layout) -> list[int] | None:
    """Return for each row of queries, keys and values its row in the file, None where they are the same.

    The dimensions that rotate lie in the first part of a head in the file, and in the first part of each of its halves
    in the engine, whose kernels then turn whole heads.
    """
    D, heads, KV = config.head_size, config.n_head, config.n_kv_head
    shared = heads // KV  # queries of one head of keys
    turned, still = (int(D * config.rope.part) // 2, D // 2) if config.rope else (D // 2, D // 2)
    rest = turned + still
    halves = [*range(turned), *range(2 * turned, rest), *range(turned, 2 * turned), *range(rest, D)]
    if layout.interleaved:
        halves = [2 * (i % turned) + i // turned if i < 2 * turned else i for i in halves]
    stored = [*range(heads + 2 * KV)]
    if layout.by_kv_head:
        groups = [stored[first : first + shared + 2] for first in range(0, len(stored), shared + 2)]
        stored = [h for g in groups for h in g[:-2]] + [g[-2] for g in groups] + [g[-1] for g in groups]
    order = [head * D + i for h, head in enumerate(stored) for i in (halves if h < heads + KV else range(D))]
    return None if order == [*range(len(order))] else order


def _block(config: Architecture) -> dict[str, tuple[tuple[int, ...], int | None, bool]]:
    """Return, for each part of a block, the rows that may be stored apart, the columns, and whether it has a bias."""
    C, D, inner, E = config.n_embd, config.head_size, config.inner_size, config.experts or 1
    q, kv = config.n_head * D, config.n_kv_head * D
    norm: tuple[tuple[int, ...], int | None, bool] = ((C,), None, config.norm == "layer")
    parts = {
        "norm_1": norm,
        "qkv": ((q, kv, kv), C, config.qkv_bias),
        "attn_proj": ((C,), q, config.proj_bias),
        "norm_2": norm,
        "fc": (((inner, inner) if config.gated else (inner,)) * E, C, config.mlp_bias),
        "mlp_proj": ((C,) * E, inner, config.mlp_bias),
    }
    if config.experts:
        parts["router"] = ((E,), C, False)
    if config.both_norms:
        parts |= {"attn_norm": norm, "mlp_norm": norm}
    if config.one_norm:
        del parts["norm_2"]
    if config.qk_norm:
        widths = (q, kv) if config.whole_qk_norm else (D, D)
        parts |= {name: ((width,), None, False) for name, width in zip(("q_norm", "k_norm"), widths)}
    return parts


def differences(stored: Shapes, config: Architecture, layout: Layout) -> str:
    """Return every missing, unexpected and mis-shaped tensor in one line, or nothing.

    stored: by name without prefix. A tied model may also store a head, or store it in place of the embedding.
    """
    expected = {name: piece.shape for name, piece in pieces(config, layout).items()}
    embedding, head = f"{layout.embedding}.weight", f"{layout.head}.weight"
    if config.tied and head in stored:
        expected[head] = expected[embedding]
        if embedding not in stored:
            del expected[embedding]
    problems = []
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    if missing:
        problems.append(f"missing {_grouped(missing)}")
    if unexpected:
        problems.append(f"unexpected {_grouped(unexpected)}")
    wrong: dict[str, list[str]] = defaultdict(list)
    for name, shape in expected.items():
        if name in stored and stored[name] != shape:
            wrong[f"is {list(stored[name])} but should be {list(shape)}"].append(name)
    problems += [f"{_grouped(names)} {difference}" for difference, names in wrong.items()]
    return "; ".join(problems)


def _grouped(names: list[str]) -> str:
    """Name all `names` in one line: h.0.ln_1.bias and h.1.ln_1.bias become h.{0,1}.ln_1.bias."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = re.match(r"([a-z_.]+\.)(\d+)\.(.+)", name)
        layers[f"{match[1]}{{}}.{match[3]}" if match else name].append(match[2] if match else "")
    return ", ".join(
        (form.format(numbers[0]) if len(numbers) == 1 else form.format(f"{{{','.join(numbers)}}}"))
        if numbers[0]
        else form
        for form, numbers in layers.items()
    )

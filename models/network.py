"""The tensors of a model in the engine's layout: queries, keys and values in one matrix, gate above up in another.

It computes nothing: `generate/cpu/blocks.py` and `generate/gpu/layers.py` do. It must not know checkpoints or families.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.architecture import Architecture
from models.gguf.block_matrix import BlockMatrix, Weight


class Norm(NamedTuple):
    """weight (n). A layer norm has a bias, too."""

    weight: Tensor
    bias: Tensor | None = None


class Projection(NamedTuple):
    """A linear layer: weight (out, in), bias (out)."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(slots=True)
class Block:
    """One layer. C = n_embd, H and KV heads of D values.

    qkv: (H * D + 2 * KV * D, C), queries, then keys, then values.
    attn_proj: (C, H * D).
    fc: (inner, C), or (2 * inner, C) with the gate's rows before the up projection's.
    mlp_proj: (C, inner).
    attn_norm, mlp_norm: norms of the outputs of attention and the MLP, with `both_norms` only.
    router: (experts, C), in a mixture only; its fc and mlp_proj have the rows of all experts, one after the other.
    q_norm, k_norm: (D), with `qk_norm` only; (H * D) and (KV * D) with `whole_qk_norm`.
    """

    norm_1: Norm
    qkv: Projection
    attn_proj: Projection
    norm_2: Norm
    fc: Projection
    mlp_proj: Projection
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attn_norm: Norm | None = None
    mlp_norm: Norm | None = None
    router: Projection | None = field(default=None, kw_only=True)

    def mlps(self) -> list[tuple[Projection, Projection]]:
        """Return fc and mlp_proj of each expert, or of the plain MLP."""
        if self.router is None:
            return [(self.fc, self.mlp_proj)]
        parts = (part.weight.chunk(self.router.weight.shape[0]) for part in (self.fc, self.mlp_proj))
        return [(Projection(fc), Projection(proj)) for fc, proj in zip(*parts)]

    def tensors(self) -> Iterator[Weight]:
        """Yield all tensors."""
        for part in (getattr(self, part.name) for part in fields(self)):
            if part is not None:
                yield from (tensor for tensor in part if tensor is not None)


@dataclass(slots=True)
class Network:
    """A whole model. embedding: (V, C). positions: (T, C), None with rotary positions. head: (V, C), tied or own.

    embedding_norm: with `embedding_norm` only. head_bias: (V), with `head_bias` only. A tied head in blocks has the numbers of the embedding in other bytes.
    """

    config: Architecture
    embedding: Tensor
    positions: Tensor | None
    blocks: list[Block]
    norm: Norm
    head: Weight
    embedding_norm: Norm | None = None
    head_bias: Tensor | None = None

    def network(self) -> Network:
        """Return itself; a `GPT` has this method, too."""
        return self

    def take_blocks(self) -> Iterator[Block]:
        """Yield the blocks and take each out of `blocks`, so that packed weights can take its place."""
        self.blocks.reverse()
        while self.blocks:
            yield self.blocks.pop()

    def tensors(self) -> Iterator[Weight]:
        """Yield each tensor once."""
        yield self.embedding
        if self.positions is not None:
            yield self.positions
        for block in self.blocks:
            yield from block.tensors()
        outside = (*self.norm, *(self.embedding_norm or ()), self.head_bias)
        yield from (tensor for tensor in outside if tensor is not None)
        if self.head is not self.embedding and not (self.config.tied and isinstance(self.head, BlockMatrix)):
            yield self.head

    def shortened(self, context: int) -> Network:
        """Return the model for texts of at most `context` tokens; the tensors are shared."""
        positions = None if self.positions is None else self.positions[:context]
        return replace(self, config=replace(self.config, block_size=context), positions=positions)

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(tensor.numel() for tensor in self.tensors())

    def to(self, target: torch.device | torch.dtype) -> Network:
        """Return the model on another device or in another dtype; tensors that need no change are shared."""
        is_tied = self.head is self.embedding
        names = [part.name for part in fields(self) if part.name != "config" and not (is_tied and part.name == "head")]
        moved = {name: _moved(getattr(self, name), target) for name in names}
        return replace(self, **moved, **({"head": moved["embedding"]} if is_tied else {}))


def _moved(value: Any, target: torch.device | torch.dtype) -> Any:
    """Return a tensor, or a part with all of its tensors, on another device or in another dtype."""
    if isinstance(value, Norm | Projection):
        return type(value)(*(_moved(tensor, target) for tensor in value))
    if isinstance(value, Block):
        return Block(**{part.name: _moved(getattr(value, part.name), target) for part in fields(value)})
    if isinstance(value, list):
        return [_moved(block, target) for block in value]
    return None if value is None else value.to(target)

"""A model's layers one by one, from Python: for any architecture, on any device, in any format.

The oracle of `generate/cpu/blocks.py`, whose C computes all layers in one call, and what serves where that cannot run.
It must not know requests, sampling, or who owns a page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu.attention import Attention, PackedRows
from generate.cpu.experts import Experts
from generate.cpu.linear import Extra, Gated, KernelLinear, LinearLayer, make_gated, make_linear
from generate.quantize import check_finite
from generate.rotary import make_turn, rms_norm, rotation_tables, turn_heads
from models import network
from models.architecture import Architecture, Rope

Rotations = dict[Rope | None, Tensor]  # cosine and sine of the angles of each row, float32 (M, 2, D/2)


class Block:
    """One transformer block with its weights in the fastest layout."""

    def __init__(self, block: network.Block, config: Architecture, layer: int, quantize: str = "none") -> None:
        self.norm_1, self.norm_2 = block.norm_1, block.norm_2
        self.normalize_1, self.normalize_2 = make_norm(block.norm_1, config), make_norm(block.norm_2, config)
        self.head_norms = [norm and norm.weight for norm in (block.q_norm, block.k_norm)]
        self.norm_after, self.parallel = config.norm_after, config.parallel
        behind = (block.norm_1, block.norm_2) if config.norm_after else (block.attn_norm, block.mlp_norm)
        self.behind_1, self.behind_2 = (norm and make_norm(norm, config) for norm in behind)
        self.turn = make_turn(block, config, layer)
        self.scale, self.reach = config.attention_scale(layer), config.reach_of(layer)
        for part in ("qkv", "attn_proj", "fc", "mlp_proj"):
            check_finite(quantize, f"layer {layer}'s {part} weight", getattr(block, part).weight)
        self.qkv = make_linear(*block.qkv, quantize=quantize)
        self.attn_proj = make_linear(*block.attn_proj, quantize=quantize)
        self.layer = layer
        self.experts = Experts(block, config, quantize) if config.experts else None
        if self.experts is not None:
            return
        self.fc: LinearLayer | Gated
        if config.gated:
            self.fc = make_gated(*block.fc, config.activation, quantize)
        else:
            self.fc = make_linear(*block.fc, config.activation, quantize)
        self.mlp_proj = make_linear(*block.mlp_proj, quantize=quantize)

    @property
    def kernels(self) -> list[KernelLinear]:
        """The linear layers in the order of blocks.c, without those that C does not compute."""
        layers = (self.qkv, self.attn_proj, self.fc, self.mlp_proj)
        return [layer for layer in layers if isinstance(layer, KernelLinear)]

    def __call__(
        self, x: Tensor, attend: Attention, keys: Tensor, values: Tensor, rows: PackedRows, rotations: Rotations
    ) -> Tensor:
        def extra(part: str, y: Tensor) -> Extra | None:
            return None if rows.adapters is None else rows.adapters.extra(self.layer, part, y)

        y = x if self.norm_after else self.normalize_1(x)
        beside = self.normalize_2(x) if self.parallel else None
        qkv = self.qkv(y, extra("qkv", y))  # (M, C) -> (M, (H + 2 KV) * D)
        if self.turn is not None:
            qkv = turn_heads(qkv, rotations[self.turn.rope], self.turn)
        y = attend(qkv, keys, values, rows, self.scale, self.reach)  # (M, H * D)
        x = self._add(self.attn_proj, y, x, self.behind_1, extra("attn_proj", y))  # (M, H * D) -> (M, C)
        y = beside if beside is not None else x if self.norm_after else self.normalize_2(x)
        if self.experts is not None:
            return self._add(self.experts, y, x, self.behind_2, None)
        y = self.fc(y, extra("fc", y))  # (M, C) -> (M, inner)
        return self._add(self.mlp_proj, y, x, self.behind_2, extra("mlp_proj", y))  # (M, inner) -> (M, C)

    def _add(
        self, layer: LinearLayer, y: Tensor, x: Tensor, behind: Callable[[Tensor], Tensor] | None, extra: Extra | None
    ) -> Tensor:
        return x + behind(layer(y, extra)) if behind else layer.add(y, x, extra)


def make_norm(norm: network.Norm, config: Architecture) -> Callable[[Tensor], Tensor]:
    """Return the layer norm or RMS norm of this architecture over the last dimension."""
    if config.norm == "rms":
        return functools.partial(rms_norm, weight=norm.weight, epsilon=config.norm_epsilon)
    shape = norm.weight.shape
    return lambda x: F.layer_norm(x, shape, norm.weight, norm.bias, config.norm_epsilon)


class LayeredBlocks:
    """Everything below the head, block after block, for any architecture, on any device and in any format."""

    def __init__(
        self, model: network.Network, blocks: Sequence[Block], attend: Attention, keys: Tensor, values: Tensor
    ) -> None:
        config = model.config
        self.embedding, self.positions = model.embedding, model.positions
        self.rotations = rotation_tables(config, model.embedding.device)  # (T, 2, D/2) each
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=model.embedding.dtype).item()
        self.norm = make_norm(model.norm, config)
        self.embedding_norm = model.embedding_norm and make_norm(model.embedding_norm, config)
        self.blocks, self.attend = blocks, attend
        self.keys, self.values = keys, values

    def __call__(self, ids: Tensor, positions: Tensor, rows: PackedRows, sample_rows: Tensor | None) -> Tensor:
        """Write the keys and values of all rows; return the normed states of `sample_rows`, of all rows for None.

        ids, positions: int64 [M]. sample_rows: int64 [R]. Returns [R, C].
        """
        x: Tensor = F.embedding(ids, self.embedding) * self.embedding_scale  # (M, C)
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        rotations = {rope: table[positions] for rope, table in self.rotations.items()}  # (M, 2, D/2) each
        for block, keys, values in zip(self.blocks, self.keys, self.values):
            x = block(x, self.attend, keys, values, rows, rotations)
        return self.norm(x if sample_rows is None else x[sample_rows])  # (R, C)

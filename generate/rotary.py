"""Rotary position embedding of heads, and the RMS norm before it, in plain PyTorch on any device.

Su et al., RoFormer, 2021; in the form of Llama's checkpoints, which rotate dimension i with dimension i + D/2. It must
not know pages, requests, or the layers of a family.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.architecture import Architecture, Llama3Scaling, Rope
from models.network import Block


def frequencies(rope: Rope, head_size: int, positions: int) -> Tensor:
    """Return the angle per position of each pair of dimensions that is rotated, float32 [D/2], for this many positions.

    In float32 like transformers: at position 8,000 the last bit of a frequency is a thousandth of a radian.
    """
    size = int(head_size * rope.part)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    if rope.longrope is not None:
        divisors = rope.longrope.long if positions > rope.longrope.original_context else rope.longrope.short
        return 1.0 / (torch.tensor(divisors) * rope.theta**exponents)
    plain = 1.0 / (rope.theta**exponents) / rope.factor
    return plain if rope.llama3 is None else _stretched(plain, rope.llama3)


def _stretched(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow down long wavelengths by `factor`, keep short ones, and blend between (Llama 3.1, model card)."""
    wavelength = 2 * math.pi / plain
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    slow = torch.where(wavelength > longest, plain / scaling.factor, plain)
    share = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * slow / scaling.factor + share * slow
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, blended, slow)


def rotation_table(rope: Rope, head_size: int, positions: int) -> Tensor:
    """Return cosine and sine of every angle, float32 [positions, 2, D/2]."""
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_size, positions)  # [T, rotated / 2]
    stretch, still = rope.longrope.stretch if rope.longrope else 1.0, head_size // 2 - angles.shape[1]
    cosines, sines = F.pad(angles.cos() * stretch, (0, still), value=1.0), F.pad(angles.sin() * stretch, (0, still))
    return torch.stack((cosines, sines), 1)


def rotation_tables(config: Architecture, device: torch.device) -> dict[Rope | None, Tensor]:
    """Return the table of each rotation of a model, on `device`."""
    ropes = filter(None, (config.rope, config.local_rope))
    return {rope: rotation_table(rope, config.head_size, config.block_size).to(device) for rope in ropes}


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return x [M, H, D] turned by `rotation` [M, 2, D/2], computed in float32, as x's dtype."""
    first, second = x.float().chunk(2, -1)  # [M, H, D/2] each
    cosine, sine = rotation[:, :1], rotation[:, 1:]  # [M, 1, D/2] each
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) in float32, cast to the weight's dtype, times weight, as x's dtype.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. Over the last dimension.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


class Turn(NamedTuple):
    """How H query heads and KV key heads, of D values each, are normalized and rotated before attention.

    norms: the weights of the RMS norms of queries and of keys before the rotation, one after the other, or None. They are
        of each head, [2 * D], or of all heads together, [(H + KV) * D].
    """

    H: int
    KV: int
    D: int
    norms: Tensor | None
    eps: float
    rope: Rope | None = None


def make_turn(block: Block, config: Architecture, layer: int) -> Turn | None:
    """Return the rotation of this layer, None for one without."""
    rope = config.rope_of(layer)
    if rope is None:
        return None
    norms = None
    if block.q_norm is not None and block.k_norm is not None:
        norms = torch.cat((block.q_norm.weight, block.k_norm.weight))
    return Turn(config.n_head, config.n_kv_head, config.head_size, norms, config.norm_epsilon, rope)


def turn_heads(qkv: Tensor, rotation: Tensor, turn: Turn) -> Tensor:
    """Return qkv [n, (H + 2 KV) * D] with queries and keys rotated; rotation: float32 [n, 2, D/2]."""
    heads = qkv.view(len(qkv), -1, turn.D)  # (n, H + 2 KV, D)
    parts, v = [heads[:, : turn.H], heads[:, turn.H : -turn.KV]], heads[:, -turn.KV :]
    if turn.norms is not None:
        weights = turn.norms.view(-1)
        first = turn.H * turn.D if len(weights) > 2 * turn.D else turn.D
        pairs = [*zip(parts, (weights[:first], weights[first:]))]
        parts = [rms_norm(part.reshape(len(qkv), -1, len(weight)), weight, turn.eps) for part, weight in pairs]
    turned = (rotate(part.view(len(qkv), -1, turn.D), rotation) for part in parts)
    return torch.cat((*turned, v), 1).view(qkv.shape)

"""Tokens drawn in Triton by the rule of `sampling.draw` without filters: two kernels behind PyTorch's maximum.

It must not know requests, pages or batches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from generate.gpu.sampling import BLOCK, NOT_FINITE
from generate.sampling import signed

AT_ONCE = 8  # blocks of one program of the first kernel
STEP, FIRST, SECOND = (tl.constexpr(signed(n)) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def _weights(LOGITS, c, V: tl.constexpr, best, inverse, EXACT: tl.constexpr):
    """Return the weights of columns c of a row, 0 behind the last; EXACT: by PyTorch's exponential, to the bit."""
    x = (tl.load(LOGITS + c, mask=c < V, other=-float("inf")) - best) * inverse.to(tl.float32)
    return (libdevice.exp(x) if EXACT else tl.exp(x)).to(tl.float64)


@triton.jit
def _sum_blocks(
    LOGITS, BEST, INVERSE, SUMS, stride,
    V: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best, inverse = tl.load(BEST + row), tl.load(INVERSE + row)
    if (inverse > 0) & (tl.abs(best) < float("inf")):
        b = tl.program_id(1) * BN + tl.arange(0, BN)
        c = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(SUMS + row * N + b, tl.sum(_weights(LOGITS + row * stride, c, V, best, inverse, EXACT), 1), mask=b < N)


@triton.jit
def _mixed(z, SHIFT: tl.constexpr):  # a logical shift of int64
    return z ^ ((z >> SHIFT) & ((1 << (64 - SHIFT)) - 1))


@triton.jit
def _draw(
    LOGITS, BEST, INVERSE, SUMS, stride, KEYS, POSITIONS, TOKENS,
    V: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr, BAD: tl.constexpr,
):  # fmt: skip
    """Replace the likeliest token of a row with a temperature. N blocks; BN: a power of two that is at least N."""
    row = tl.program_id(0).to(tl.int64)
    best, inverse = tl.load(BEST + row), tl.load(INVERSE + row)
    if not (tl.abs(best) < float("inf")):  # NaN, too
        tl.store(TOKENS + row, BAD)
    elif inverse > 0:
        z = tl.load(KEYS + row) + (tl.load(POSITIONS + row) + 1) * STEP  # see `sampling.uniforms`
        z = _mixed(_mixed(_mixed(z, 30) * FIRST, 27) * SECOND, 31)
        where = ((z >> 11) & ((1 << 53) - 1)).to(tl.float64) * (1.0 / (1 << 53))
        b = tl.arange(0, BN)  # the rest is `sampling._invert`
        sums = tl.cumsum(tl.load(SUMS + row * N + b, mask=b < N, other=0.0), 0)
        goal = where * tl.sum(tl.where(b == N - 1, sums, 0.0), 0)
        block = tl.minimum(tl.sum(((sums <= goal) & (b < N)).to(tl.int32), 0), N - 1)
        before = tl.sum(tl.where(b == block - 1, sums, 0.0), 0)
        c = block * BLOCK + tl.arange(0, BLOCK)
        inside = before + tl.cumsum(_weights(LOGITS + row * stride, c, V, best, inverse, EXACT), 0)
        token = block * BLOCK + tl.minimum(tl.sum((inside <= goal).to(tl.int32), 0), BLOCK - 1)
        tl.store(TOKENS + row, tl.minimum(token, V - 1))


def draw(logits: Tensor, keys: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """Return the tokens; see `sampling.draw`."""
    best, tokens = logits.max(dim=1)
    (n, V), blocks = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    sums = torch.empty(n, blocks, dtype=torch.float64, device=logits.device)
    given = logits, best, inverse, sums, logits.stride(0)
    sizes = {"V": V, "N": blocks, "BLOCK": BLOCK, "EXACT": logits.is_cuda}  # the interpreter lacks CUDA's library
    _sum_blocks[(n, triton.cdiv(blocks, AT_ONCE))](*given, BN=AT_ONCE, **sizes)
    _draw[(n,)](*given, keys, positions, tokens, BN=triton.next_power_of_2(blocks), BAD=NOT_FINITE, **sizes)
    return tokens

"""Triton kernels between the attentions: residual and layer norm in one, and a product with one order of sums.

It must not know which layer it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The same for any number of rows: the order of a row's sums depends on them.
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


@triton.jit
def _add_norm(R, X, W, B, Y, eps, C: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    inside = c < C
    x = tl.load(R + row * C + c, mask=inside, other=0.0)
    if ADD:
        x += tl.load(X + row * C + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(R + row * C + c, x, mask=inside)
    z = tl.where(inside, x - tl.sum(x, 0) / C, 0.0)
    y = z * tl.rsqrt(tl.sum(z * z, 0) / C + eps)
    y = y * tl.load(W + c, mask=inside, other=0.0) + tl.load(B + c, mask=inside, other=0.0)
    tl.store(Y + row * C + c, y.to(Y.dtype.element_ty), mask=inside)


def add_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Add x [n, C] to the float32 residual in place, if there is one; return the sum's layer norm as `dtype`."""
    n, C = residual.shape
    y = torch.empty(n, C, dtype=dtype, device=residual.device)
    _add_norm[(n,)](
        residual, residual if x is None else x, weight, bias, y, eps,
        C=C, BC=triton.next_power_of_2(C), ADD=x is not None,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M"])  # one program for any number of rows
def _linear(
    X, W, B, Y, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        inner = start + k < K
        x = tl.load(X + m[:, None] * K + start + k[None, :], mask=(m < M)[:, None] & inner[None, :], other=0.0)
        w = tl.load(W + n[None, :] * K + start + k[:, None], mask=(n < N)[None, :] & inner[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GELU:  # the tanh form; tanh |z| by an exponential that cannot overflow
        z = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
        fall = tl.exp(-2.0 * tl.abs(z))
        bend = (1.0 - fall) / (1.0 + fall)
        acc = 0.5 * acc * (1.0 + tl.where(z < 0, -bend, bend))
    tl.store(Y + m[:, None] * N + n[None, :], acc.to(Y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x W + b for weight (out, in), through GPT-2's GELU if `gelu`; a row's bits do not depend on the others."""
    x = x.contiguous()
    (M, K), N = x.shape, len(weight)
    y = torch.empty(M, N, dtype=out_dtype or x.dtype, device=x.device)
    _linear[(triton.cdiv(N, BLOCK_N), triton.cdiv(M, BLOCK_M))](
        x, weight, weight if bias is None else bias, y, M, N, K,
        BM=BLOCK_M, BN=BLOCK_N, BK=BLOCK_K, BIAS=bias is not None, GELU=gelu,
    )  # fmt: skip
    return y

"""Triton kernels between the attentions: residual and norm in one, head norms and rotation in one, a gate, and a product
with one order of sums.

Each row is computed alone, with sums in one order, so that its bits do not depend on the batch.

It must not know which layer it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The same for any number of rows: the order of a row's sums depends on them.
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
HEADS, COLUMNS = 4, 1024  # of one program of `turn` and of `silu_gate`


@triton.jit
def _add_norm(
    R, X, W, B, Y, eps, stride, C: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr, RMS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    inside = c < C
    x = tl.load(R + row * stride + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(X + row * C + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(R + row * stride + c, x, mask=inside)
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    if RMS:  # in the weight's dtype
        y = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
        y = y.to(W.dtype.element_ty).to(tl.float32) * w
    else:
        z = tl.where(inside, x - tl.sum(x, 0) / C, 0.0)
        y = z * tl.rsqrt(tl.sum(z * z, 0) / C + eps)
        y = y * w + tl.load(B + c, mask=inside, other=0.0)
    tl.store(Y + row * stride + c, y.to(Y.dtype.element_ty), mask=inside)


def add_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    """Add x [n, C] to the float32 residual in place, if there is one; return the sum's norm as `dtype`.

    A layer norm with a bias, an RMS norm without.
    """
    n, C = residual.shape
    y = torch.empty(n, C, dtype=dtype, device=residual.device)
    _add_norm[(n,)](
        residual, residual if x is None else x, weight, weight if bias is None else bias, y, eps, C,
        C=C, BC=triton.next_power_of_2(C), ADD=x is not None, RMS=bias is None,
    )  # fmt: skip
    return y


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """Replace the rows of x [n, C], which may be a part of wider ones, by their RMS norms."""
    n, C = x.shape
    _add_norm[(n,)](
        x, x, weight, weight, x, eps, x.stride(0), C=C, BC=triton.next_power_of_2(C), ADD=False, RMS=True
    )  # fmt: skip


@triton.jit
def _turn(
    QKV, R, W, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    half: tl.constexpr = D // 2
    inside = (h < H + KV)[:, None] & (d < half)[None, :]  # [BH, BD]
    at = QKV + row * ((H + 2 * KV) * D) + h[:, None] * D + d[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:  # in the weight's dtype, and a cast after the weight
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        weight = W + (h >= H).to(tl.int32)[:, None] * D + d[None, :]
        w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        first = (first * scale).to(W.dtype.element_ty).to(tl.float32) * w
        w = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        second = (second * scale).to(W.dtype.element_ty).to(tl.float32) * w
        first = first.to(QKV.dtype.element_ty).to(tl.float32)
        second = second.to(QKV.dtype.element_ty).to(tl.float32)
    cosine = tl.load(R + row * D + d, mask=d < half, other=0.0)[None, :]
    sine = tl.load(R + row * D + half + d, mask=d < half, other=0.0)[None, :]
    tl.store(at, (first * cosine - second * sine).to(QKV.dtype.element_ty), mask=inside)
    tl.store(at + half, (second * cosine + first * sine).to(QKV.dtype.element_ty), mask=inside)


def turn(qkv: Tensor, rotation: Tensor, heads: int, kv_heads: int, norms: Tensor | None, eps: float) -> Tensor:
    """Norm the heads of queries and keys of qkv [n, (heads + 2 kv_heads) * D] in place, if there are weights; rotate them.

    rotation: float32 [n, 2, D/2], cosine and sine. norms: [2 * D], of queries and keys.
    """
    n = len(qkv)
    D = qkv.shape[1] // (heads + 2 * kv_heads)
    _turn[(n, triton.cdiv(heads + kv_heads, HEADS))](
        qkv, rotation, qkv if norms is None else norms, eps,
        H=heads, KV=kv_heads, D=D, BH=HEADS, BD=triton.next_power_of_2(D // 2), NORM=norms is not None,
    )  # fmt: skip
    return qkv


@triton.jit
def _silu_gate(Y, OUT, N: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    gate = tl.load(Y + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Y + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(OUT.dtype.element_ty).to(tl.float32)  # as PyTorch rounds it
    tl.store(OUT + row * N + n, (gate * up).to(OUT.dtype.element_ty), mask=inside)


def silu_gate(y: Tensor) -> Tensor:
    """Return silu(gate) * up [n, N] of gate and up side by side, y [n, 2 N]."""
    n, N = len(y), y.shape[1] // 2
    out = torch.empty(n, N, dtype=y.dtype, device=y.device)
    _silu_gate[(n, triton.cdiv(N, COLUMNS))](y, out, N=N, BN=COLUMNS)
    return out


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

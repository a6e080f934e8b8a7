"""Decode attention over KV pages in Triton: one new token per row, appended by the kernel that attends to it.

A program computes one page of one head of one row, so that a row's sums are cut at its pages and nowhere else: they do
not depend on the batch. The program of the row that finishes last joins the pages' results, in the order of the pages.
One query cannot use tensor cores: the kernel's task is to read keys and values at the memory's speed.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from generate.gpu.attention import DecodeRows

BLOCK = 64  # keys at once; a page is a multiple of it, or smaller


@triton.jit
def _append_new(new, KEYS, VALUES, q, slot, wide, C: tl.constexpr):
    """Store the new token's key and value; return its score and value, with which the page's softmax begins."""
    k = tl.load(new + C, mask=wide, other=0.0)
    v = tl.load(new + 2 * C, mask=wide, other=0.0)
    tl.store(KEYS + slot, k, mask=wide)
    tl.store(VALUES + slot, v, mask=wide)
    return tl.sum(q * k.to(tl.float32), 0), v.to(tl.float32)


@triton.jit
def _attend_past(
    KEYS, VALUES, q, tile, end, d, wide, peak, total, mix, D: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Add the first `end` tokens of a page to the running softmax (peak, sum of weights, weighted sum of values)."""
    for start in range(0, end, BN):
        t = start + tl.arange(0, BN)
        is_past = t < end
        at = tile + t[:, None] * D + d[None, :]  # [BN, BD]
        mask = is_past[:, None] & wide[None, :]
        k = tl.load(KEYS + at, mask=mask, other=0.0)
        v = tl.load(VALUES + at, mask=mask, other=0.0)  # before k is used, so that both loads are in flight
        x = tl.where(is_past, tl.sum(q[None, :] * k.to(tl.float32), 1), -float("inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        weight = tl.exp(x - higher)
        fade = tl.exp(peak - higher)
        mix = mix * fade + tl.sum(weight[:, None] * v.to(tl.float32), 0)
        total = total * fade + tl.sum(weight, 0)
        peak = higher
    return peak, total, mix


@triton.jit
def _join_pages(parts, pages, d, wide, D: tl.constexpr, MP: tl.constexpr):
    """Return the row's attention from the parts of all its pages, which other programs have stored."""
    # All at once: one wait for memory. .cg bypasses this core's own cache, which may be stale.
    i = tl.arange(0, MP)
    part = parts + i * (D + 2)
    known = i < pages
    peaks = tl.load(part + D, mask=known, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(part + D + 1, mask=known, other=0.0, cache_modifier=".cg")
    mixes = tl.load(part[:, None] + d[None, :], mask=known[:, None] & wide[None, :], other=0.0, cache_modifier=".cg")
    weights = tl.exp(peaks - tl.max(peaks, 0))
    return tl.sum(weights[:, None] * mixes, 0) / tl.sum(weights * sums, 0)


@triton.jit
def _attend(
    QKV, KEYS, VALUES, BLOCK_TABLES, CONTEXT_LENS, OUT, PARTS, ARRIVED, scale, MAX_PAGES,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    MP: tl.constexpr,
):  # fmt: skip
    # Pages are the fastest dimension: programs without work then run beside those with work, not all at the end.
    page, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(CONTEXT_LENS + row)  # with the new token; 0 for an unused row
    pages = tl.cdiv(n, P)
    C: tl.constexpr = H * D
    d = tl.arange(0, BD)
    wide = d < D
    out = OUT + row * C + h * D + d
    if pages == 0 and page == 0:
        tl.store(out, tl.zeros([BD], tl.float32), mask=wide)
    if page < pages:
        new = QKV + row * 3 * C + h * D + d
        q = tl.load(new, mask=wide, other=0.0).to(tl.float32) * scale
        tile = (tl.load(BLOCK_TABLES + row * MAX_PAGES + page).to(tl.int64) * H + h) * P * D
        peak = -float("inf")
        total = 0.0
        mix = tl.zeros([BD], tl.float32)
        end = tl.minimum(n - 1 - page * P, P).to(tl.int32)  # tokens of the past in this page
        if page == pages - 1:
            peak, mix = _append_new(new, KEYS, VALUES, q, tile + end * D + d, wide, C)
            total = 1.0
        peak, total, mix = _attend_past(KEYS, VALUES, q, tile, end, d, wide, peak, total, mix, D, BN)
        if pages == 1:
            tl.store(out, mix / total, mask=wide)
        else:
            parts = PARTS + (row * H + h).to(tl.int64) * MAX_PAGES * (D + 2)
            own = parts + page * (D + 2)
            tl.store(own + d, mix, mask=wide)
            tl.store(own + D, peak)
            tl.store(own + D + 1, total)
            tl.debug_barrier()  # all threads have stored before one of them counts this page as arrived
            # acq_rel: the last program to arrive sees the parts that all others stored before they arrived.
            if tl.atomic_add(ARRIVED + row * H + h, 1, sem="acq_rel") == pages - 1:
                tl.store(out, _join_pages(parts, pages, d, wide, D, MP), mask=wide)
                tl.store(ARRIVED + row * H + h, 0)  # ready for the next launch


class TritonDecode:
    """Launch the kernel for up to `rows` rows of `max_pages` pages, on one stream at a time."""

    name = "triton"

    def __init__(self, rows: int, max_pages: int, heads: int, head_size: int, device: torch.device) -> None:
        shape = (rows, heads, max_pages, head_size + 2)
        self.parts = torch.empty(shape, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * heads, dtype=torch.int32, device=device)

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
        """See `attention.DecodeAttention`."""
        _, H, P, D = keys.shape
        n, pages = rows.block_tables.shape
        out = torch.empty(n, H * D, dtype=qkv.dtype, device=qkv.device)
        _attend[(pages, H, n)](
            qkv, keys, values, rows.block_tables, rows.context_lens, out, self.parts, self.arrived, scale, pages,
            H=H, P=P, D=D, BD=triton.next_power_of_2(D), BN=min(BLOCK, triton.next_power_of_2(P)),
            MP=max(2, triton.next_power_of_2(pages)),
        )  # fmt: skip
        return out

"""Decode attention over KV pages in Triton: one new token per row, appended by the kernel that attends to it.

A program computes a page of one KV head of one row for all query heads that share it, so that each key and value is
read once. A row's sums are cut at its pages and nowhere else: they do not depend on the batch. In a context of more
than MOST_PARTS pages a program computes every MOST_PARTS-th page after its first, one after the other. The program of
a row that finishes last joins the results of all, in their order.

One query per KV head (`_attend`) cannot use tensor cores: the kernel's task is to read keys and values at the memory's
speed. A group of them (`_attend_group`) has too many products for anything else.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from generate.gpu.attention import DecodeRows
from models.architecture import FULL, Reach

# Keys at once; a page is a multiple of it, or smaller. With 64 keys of 128 values the registers of a group would spill.
BLOCK, GROUP_BLOCK = 64, 32
# Bounds the programs without work, the memory of partial results, and what the last program joins at once.
MOST_PARTS = 64
SMALLEST = 16  # of each side of a product of tensor cores


@triton.jit
def capped(x, CAP: tl.constexpr):
    """Return CAP * tanh(x / CAP), or x for 0."""
    if CAP > 0:
        x = CAP * (2 * tl.sigmoid(2 * x / CAP) - 1)
    return x


@triton.jit
def leaning(x, h, distance, ALIBI: tl.constexpr):
    """Return scores of head h that fall with the distance of their keys, or x for 0; see `cpu.attention.slopes`."""
    if ALIBI > 0:
        x -= tl.exp2(tl.where(h < ALIBI, -8.0 * (h + 1), 4.0 - 8 * (h + 1 - ALIBI)) / ALIBI) * distance
    return x


@triton.jit
def _attend_past(
    KEYS, VALUES, q, h, last, tile, start, end, d, wide, peak, total, mix, D: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Add tokens `start` to `end` of a page to the running softmax (peak, sum of weights, weighted sum of values).

    last: the place of the new token in this page, or behind it.
    """
    for block in range(start // BN * BN, end, BN):
        t = block + tl.arange(0, BN)
        is_past = (t >= start) & (t < end)
        at = tile + t[:, None] * D + d[None, :]  # [BN, BD]
        mask = is_past[:, None] & wide[None, :]
        k = tl.load(KEYS + at, mask=mask, other=0.0)
        v = tl.load(VALUES + at, mask=mask, other=0.0)  # before k is used, so that both loads are in flight
        x = leaning(capped(tl.sum(q[None, :] * k.to(tl.float32), 1), CAP), h, last - t, ALIBI)
        x = tl.where(is_past, x, -float("inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        weight = tl.exp(x - higher)
        fade = tl.exp(peak - higher)
        mix = mix * fade + tl.sum(weight[:, None] * v.to(tl.float32), 0)
        total = total * fade + tl.sum(weight, 0)
        peak = higher
    return peak, total, mix


@triton.jit
def _attend_past_group(
    KEYS, VALUES, q, scale, h, last, tile, start, end, d, wide, peak, total, mix, D: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """`_attend_past` for q [BG, BD] of a group: peak and total [BG], mix [BG, BD]. The scale comes after the product."""
    for block in range(start // BN * BN, end, BN):
        t = block + tl.arange(0, BN)
        is_past = (t >= start) & (t < end)
        at = tile + t[:, None] * D + d[None, :]  # [BN, BD]
        mask = is_past[:, None] & wide[None, :]
        k = tl.load(KEYS + at, mask=mask, other=0.0)
        v = tl.load(VALUES + at, mask=mask, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BG, BN]
        x = leaning(capped(x, CAP), h[:, None], (last - t)[None, :], ALIBI)
        x = tl.where(is_past[None, :], x, -float("inf"))
        higher = tl.maximum(peak, tl.max(x, 1))
        weight = tl.exp(x - higher[:, None])
        fade = tl.exp(peak - higher)
        mix = tl.dot(weight.to(v.dtype), v, mix * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        peak = higher
    return peak, total, mix


@triton.jit
def _join_parts(parts, count, d, wide, D: tl.constexpr, BP: tl.constexpr):
    """Return a head's attention from its `count` parts, which other programs have stored."""
    # All at once: one wait for memory. .cg bypasses this core's own cache, which may be stale.
    i = tl.arange(0, BP)
    part = parts + i * (D + 2)
    known = i < count
    peaks = tl.load(part + D, mask=known, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(part + D + 1, mask=known, other=0.0, cache_modifier=".cg")
    mixes = tl.load(part[:, None] + d[None, :], mask=known[:, None] & wide[None, :], other=0.0, cache_modifier=".cg")
    weights = tl.exp(peaks - tl.max(peaks, 0))
    return tl.sum(weights[:, None] * mixes, 0) / tl.sum(weights * sums, 0)


@triton.jit
def _attend(
    QKV, KEYS, VALUES, BLOCK_TABLES, CONTEXT_LENS, OUT, PARTS, ARRIVED, scale, MAX_PAGES,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    MP: tl.constexpr, BP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """As many heads of queries as of keys. MP: the most parts of a row, BP: a power of two that is at least MP."""
    # Parts are the fastest dimension: programs without work then run beside those with work, not all at the end.
    part, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(CONTEXT_LENS + row)  # with the new token; 0 for an unused row
    end_page = tl.cdiv(n, P)
    seen = tl.maximum(n - WINDOW, 0) if WINDOW else n * 0  # the first key in the window
    pages = end_page - seen // P
    C: tl.constexpr = H * D
    d = tl.arange(0, BD)
    wide = d < D
    out = OUT + row * C + h * D + d
    if pages == 0 and part == 0:
        tl.store(out, tl.zeros([BD], tl.float32), mask=wide)
    if part < pages:
        new = QKV + row * 3 * C + h * D + d
        q = tl.load(new, mask=wide, other=0.0).to(tl.float32) * scale
        peak = -float("inf")
        total = 0.0
        mix = tl.zeros([BD], tl.float32)
        for page in range((seen // P + part).to(tl.int32), end_page.to(tl.int32), MP):
            tile = (tl.load(BLOCK_TABLES + row * MAX_PAGES + page).to(tl.int64) * H + h) * P * D
            end = tl.minimum(n - 1 - page * P, P).to(tl.int32)  # tokens of the past in this page
            start = tl.maximum(seen - page * P, 0).to(tl.int32)
            if page == end_page - 1:
                k = tl.load(new + C, mask=wide, other=0.0)
                v = tl.load(new + 2 * C, mask=wide, other=0.0)
                tl.store(KEYS + tile + end * D + d, k, mask=wide)
                tl.store(VALUES + tile + end * D + d, v, mask=wide)
                x = capped(tl.sum(q * k.to(tl.float32), 0), CAP)
                higher = tl.maximum(peak, x)
                mix = mix * tl.exp(peak - higher) + tl.exp(x - higher) * v.to(tl.float32)
                total = total * tl.exp(peak - higher) + tl.exp(x - higher)
                peak = higher
            peak, total, mix = _attend_past(
                KEYS, VALUES, q, h, n - 1 - page * P, tile, start, end, d, wide, peak, total, mix, D, BN, CAP, ALIBI
            )  # fmt: skip
        if pages == 1:
            tl.store(out, mix / total, mask=wide)
        else:
            parts = PARTS + (row * H + h).to(tl.int64) * MP * (D + 2)
            own = parts + part * (D + 2)
            tl.store(own + d, mix, mask=wide)
            tl.store(own + D, peak)
            tl.store(own + D + 1, total)
            tl.debug_barrier()  # all threads have stored before one of them counts this part as arrived
            count = tl.minimum(pages, MP)
            # acq_rel: the last program to arrive sees the parts that all others stored before they arrived.
            if tl.atomic_add(ARRIVED + row * H + h, 1, sem="acq_rel") == count - 1:
                tl.store(out, _join_parts(parts, count, d, wide, D, BP), mask=wide)
                tl.store(ARRIVED + row * H + h, 0)  # ready for the next launch


@triton.jit
def _attend_group(
    QKV, KEYS, VALUES, BLOCK_TABLES, CONTEXT_LENS, OUT, PARTS, ARRIVED, scale, MAX_PAGES,
    KV: tl.constexpr, G: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, MP: tl.constexpr, BP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """`_attend` for groups of G query heads, padded to BG rows of a product."""
    part, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(CONTEXT_LENS + row)
    end_page = tl.cdiv(n, P)
    seen = tl.maximum(n - WINDOW, 0) if WINDOW else n * 0  # the first key in the window
    pages = end_page - seen // P
    d, g = tl.arange(0, BD), tl.arange(0, BG)
    wide = d < D
    inside = (g < G)[:, None] & wide[None, :]
    at = (h * G + g)[:, None] * D + d[None, :]  # [BG, BD] of the group's queries in a row of H * D
    out = OUT + row * (KV * G * D)
    if pages == 0 and part == 0:
        tl.store(out + at, tl.zeros([BG, BD], tl.float32), mask=inside)
    if part < pages:
        queries = QKV + row * ((KV * G + 2 * KV) * D)
        q = tl.load(queries + at, mask=inside, other=0.0)
        new = queries + (KV * G + h) * D + d
        peak = tl.full([BG], -float("inf"), tl.float32)
        total = tl.zeros([BG], tl.float32)
        mix = tl.zeros([BG, BD], tl.float32)
        for page in range((seen // P + part).to(tl.int32), end_page.to(tl.int32), MP):
            tile = (tl.load(BLOCK_TABLES + row * MAX_PAGES + page).to(tl.int64) * KV + h) * P * D
            end = tl.minimum(n - 1 - page * P, P).to(tl.int32)
            start = tl.maximum(seen - page * P, 0).to(tl.int32)
            if page == end_page - 1:
                k = tl.load(new, mask=wide, other=0.0)
                v = tl.load(new + KV * D, mask=wide, other=0.0)
                tl.store(KEYS + tile + end * D + d, k, mask=wide)
                tl.store(VALUES + tile + end * D + d, v, mask=wide)
                x = capped(tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale, CAP)  # [BG]
                higher = tl.maximum(peak, x)
                weight = tl.exp(x - higher)
                fade = tl.exp(peak - higher)
                mix = mix * fade[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
                total = total * fade + weight
                peak = higher
            peak, total, mix = _attend_past_group(
                KEYS, VALUES, q, scale, h * G + g, n - 1 - page * P, tile, start, end, d, wide, peak, total, mix, D, BN,
                CAP, ALIBI,
            )  # fmt: skip
        if pages == 1:
            tl.store(out + at, mix / total[:, None], mask=inside)
        else:
            parts = PARTS + (row * KV + h).to(tl.int64) * G * MP * (D + 2)
            own = parts + (g * MP + part) * (D + 2)  # [BG]
            tl.store(own[:, None] + d[None, :], mix, mask=inside)
            tl.store(own + D, peak, mask=g < G)
            tl.store(own + D + 1, total, mask=g < G)
            tl.debug_barrier()
            count = tl.minimum(pages, MP)
            if tl.atomic_add(ARRIVED + row * KV + h, 1, sem="acq_rel") == count - 1:
                for i in range(G):  # one by one: the parts of a whole group do not fit into the registers
                    joined = _join_parts(parts + i * MP * (D + 2), count, d, wide, D, BP)
                    tl.store(out + (h * G + i) * D + d, joined, mask=wide)
                tl.store(ARRIVED + row * KV + h, 0)


class TritonDecode:
    """Launch the kernel for up to `rows` rows of `max_pages` pages, on one stream at a time."""

    name = "triton"

    def __init__(
        self, rows: int, max_pages: int, heads: int, kv_heads: int, head_size: int, device: torch.device
    ) -> None:
        shape = (rows, heads, min(max_pages, MOST_PARTS), head_size + 2)
        self.parts = torch.empty(shape, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float, reach: Reach = FULL
    ) -> Tensor:
        """See `attention.DecodeAttention`."""
        _, KV, P, D = keys.shape
        n, pages = rows.block_tables.shape
        H = qkv.shape[1] // D - 2 * KV
        out = torch.empty(n, H * D, dtype=qkv.dtype, device=qkv.device)
        most = min(pages, MOST_PARTS)
        tensors = qkv, keys, values, rows.block_tables, rows.context_lens, out, self.parts, self.arrived
        sizes = {"P": P, "D": D, "MP": most, "BP": max(2, triton.next_power_of_2(most))}
        sizes |= {"WINDOW": reach.window, "CAP": reach.cap, "ALIBI": reach.alibi}
        BD, block = triton.next_power_of_2(D), triton.next_power_of_2(P)
        if H == KV:
            BN = min(BLOCK, block)
            _attend[(most, KV, n)](*tensors, scale, pages, H=H, BD=BD, BN=BN, **sizes)
        else:
            BG = triton.next_power_of_2(H // KV)
            BG, BD, BN = (max(SMALLEST, size) for size in (BG, BD, min(GROUP_BLOCK, block)))
            _attend_group[(most, KV, n)](*tensors, scale, pages, KV=KV, G=H // KV, BG=BG, BD=BD, BN=BN, **sizes)
        return out

"""Decode attention over KV pages in Triton: one new token a row, appended by the kernel that attends to it.

A program is one page of one head of one row, so that a row's sums are cut at its pages and nowhere else: they do not
depend on the batch. What the pages give is joined by the program of the row that arrives last, in an order that
depends on nothing. One query has no use for tensor cores: the kernel is there to read keys and values at the memory's
speed.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys at once; a page is a multiple of it, or smaller


@triton.jit
def _attend(
    QKV, KEYS, VALUES, TABLES, LENGTHS, OUT, PARTS, ARRIVED, scale, MAX_PAGES,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    MP: tl.constexpr,
):  # fmt: skip
    # Pages first: programs without work run beside those with it, and not all at the end, with the memory idle.
    page, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(LENGTHS + row)  # the new token included; 0: nobody's row
    pages = tl.cdiv(n, P)
    C: tl.constexpr = H * D
    d = tl.arange(0, BD)
    wide = d < D
    if pages == 0 and page == 0:
        tl.store(OUT + row * C + h * D + d, tl.zeros([BD], tl.float32), mask=wide)
    if page < pages:
        new = QKV + row * 3 * C + h * D + d
        q = tl.load(new, mask=wide, other=0.0).to(tl.float32) * scale
        tile = (tl.load(TABLES + row * MAX_PAGES + page).to(tl.int64) * H + h) * P * D
        largest = -float("inf")
        total = 0.0
        mix = tl.zeros([BD], tl.float32)
        end = tl.minimum(n - 1 - page * P, P).to(tl.int32)  # tokens of the past in this page
        if page == pages - 1:  # the new token belongs here: its softmax begins with itself
            k = tl.load(new + C, mask=wide, other=0.0)
            v = tl.load(new + 2 * C, mask=wide, other=0.0)
            tl.store(KEYS + tile + end * D + d, k, mask=wide)
            tl.store(VALUES + tile + end * D + d, v, mask=wide)
            largest = tl.sum(q * k.to(tl.float32), 0)
            total = 1.0
            mix = v.to(tl.float32)
        for start in range(0, end, BN):
            t = start + tl.arange(0, BN)
            there = t < end
            at = tile + t[:, None] * D + d[None, :]
            mask = there[:, None] & wide[None, :]
            k = tl.load(KEYS + at, mask=mask, other=0.0)
            v = tl.load(VALUES + at, mask=mask, other=0.0)  # here, so that both are on their way
            x = tl.where(there, tl.sum(q[None, :] * k.to(tl.float32), 1), -float("inf"))
            higher = tl.maximum(largest, tl.max(x, 0))
            weight = tl.exp(x - higher)
            fade = tl.exp(largest - higher)
            mix = mix * fade + tl.sum(weight[:, None] * v.to(tl.float32), 0)
            total = total * fade + tl.sum(weight, 0)
            largest = higher
        if pages == 1:
            tl.store(OUT + row * C + h * D + d, mix / total, mask=wide)
        else:
            parts = PARTS + (row * H + h).to(tl.int64) * MAX_PAGES * (D + 2)
            own = parts + page * (D + 2)
            tl.store(own + d, mix, mask=wide)
            tl.store(own + D, largest)
            tl.store(own + D + 1, total)
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(ARRIVED + row * H + h, 1, sem="acq_rel") == pages - 1:
                # All at once: one wait for memory. .cg: not from this core's own cache, which may be stale.
                i = tl.arange(0, MP)
                part = parts + i * (D + 2)
                known = i < pages
                peaks = tl.load(part + D, mask=known, other=-float("inf"), cache_modifier=".cg")
                sums = tl.load(part + D + 1, mask=known, other=0.0, cache_modifier=".cg")
                mixes = tl.load(
                    part[:, None] + d[None, :], mask=known[:, None] & wide[None, :], other=0.0, cache_modifier=".cg"
                )
                weights = tl.exp(peaks - tl.max(peaks, 0))
                mix = tl.sum(weights[:, None] * mixes, 0)
                total = tl.sum(weights * sums, 0)
                tl.store(OUT + row * C + h * D + d, mix / total, mask=wide)
                tl.store(ARRIVED + row * H + h, 0)  # ready for the next launch


class TritonDecode:
    """Launches the kernel for up to `rows` rows of `max_pages` pages; not for two streams at once."""

    name = "triton"

    def __init__(self, rows: int, max_pages: int, heads: int, head_size: int, device: torch.device) -> None:
        shape = (rows, heads, max_pages, head_size + 2)
        self.parts = torch.empty(shape, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows * heads, dtype=torch.int32, device=device)

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, tables: Tensor, scale: float
    ) -> Tensor:
        """See `attention.DecodeAttention`."""
        _, H, P, D = keys.shape
        rows, pages = tables.shape
        out = torch.empty(rows, H * D, dtype=qkv.dtype, device=qkv.device)
        _attend[(pages, H, rows)](
            qkv, keys, values, tables, lengths, out, self.parts, self.arrived, scale, pages,
            H=H, P=P, D=D, BD=triton.next_power_of_2(D), BN=min(BLOCK, triton.next_power_of_2(P)),
            MP=max(2, triton.next_power_of_2(pages)),
        )  # fmt: skip
        return out

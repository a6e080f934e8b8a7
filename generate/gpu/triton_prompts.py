"""Attention of pieces of prompts over KV pages in Triton: new tokens in tiles, each over its own past.

One launch writes the new keys and values into their pages, the next attends. Both have a program per tile and head and
read from the device what each tile is, so that a graph can hold them; programs of unused tiles return at once. Keys are
cut at multiples of BLOCK from position 0: a row's sums depend neither on the batch nor on where its prompt was cut.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from generate.gpu.attention import TILE, Pieces
from generate.gpu.triton_attention import capped, leaning
from models.architecture import FULL, Reach

BLOCK = 64  # keys at once; a page is a multiple of it, or smaller
SMALLEST = 16  # of each side of a product


@triton.jit
def _write(
    QKV, KEYS, VALUES, TILES, PAGES,
    H: tl.constexpr, KV: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    tile, h = TILES + tl.program_id(0) * 4, tl.program_id(1)
    first, count, position, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if count > 0:
        m, d = tl.arange(0, BM), tl.arange(0, BD)
        mask = (m < count)[:, None] & (d < D)[None, :]
        source = QKV + (first + m)[:, None] * ((H + 2 * KV) * D) + (H + h) * D + d[None, :]  # [BM, BD]
        page = tl.load(PAGES + start + (position + m) // P, mask=m < count, other=0)
        at = ((page * KV + h) * P + (position + m) % P)[:, None] * D + d[None, :]
        tl.store(KEYS + at, tl.load(source, mask=mask, other=0.0), mask=mask)
        tl.store(VALUES + at, tl.load(source + KV * D, mask=mask, other=0.0), mask=mask)


@triton.jit
def _attend(
    QKV, KEYS, VALUES, TILES, PAGES, OUT, scale,
    H: tl.constexpr, KV: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    tile, h = TILES + tl.program_id(0) * 4, tl.program_id(1)
    first, count, position, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if count > 0:
        m, n, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
        wide = d < D
        inside = (m < count)[:, None] & wide[None, :]
        q = tl.load(QKV + (first + m)[:, None] * ((H + 2 * KV) * D) + h * D + d[None, :], mask=inside, other=0.0)
        peak = tl.full([BM], -float("inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        mix = tl.zeros([BM, BD], tl.float32)
        end = (position + count).to(tl.int32)
        seen = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0  # the first key in the tile's windows
        for block in range((seen // BN * BN).to(tl.int32), end, BN):
            t = block + n
            page = tl.load(PAGES + start + block // P)
            at = ((page * KV + h // (H // KV)) * P + block % P) * D + n[:, None] * D + d[None, :]  # [BN, BD]
            mask = (t < end)[:, None] & wide[None, :]  # a fresh page may hold NaN, and 0 * NaN is NaN
            k = tl.load(KEYS + at, mask=mask, other=0.0)
            v = tl.load(VALUES + at, mask=mask, other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BM, BN]
            behind = (position + tl.minimum(m, count - 1))[:, None] - t[None, :]  # unused rows repeat the last
            visible = (behind >= 0) & (behind < WINDOW) if WINDOW else behind >= 0
            x = tl.where(visible, leaning(capped(x, CAP), h, behind, ALIBI), -float("inf"))
            higher = tl.maximum(peak, tl.max(x, 1))
            least = tl.maximum(higher, -1e38)  # of a row that sees no key yet: infinity less infinity is NaN
            weight = tl.exp(x - least[:, None])
            fade = tl.exp(peak - least)
            mix = tl.dot(weight.to(v.dtype), v, mix * fade[:, None], input_precision="ieee")
            total = total * fade + tl.sum(weight, 1)
            peak = higher
        out = OUT + (first + m)[:, None] * (H * D) + h * D + d[None, :]
        tl.store(out, (mix / total[:, None]).to(OUT.dtype.element_ty), mask=inside)


class TritonPrompts:
    """Launch both kernels."""

    name = "triton"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, pieces: Pieces, scale: float, reach: Reach = FULL
    ) -> Tensor:
        """See `attention.PromptAttention`."""
        _, KV, P, D = keys.shape
        H = qkv.shape[1] // D - 2 * KV
        out = torch.empty(len(qkv), H * D, dtype=qkv.dtype, device=qkv.device)
        is_float32 = qkv.dtype == torch.float32  # without tensor cores, a larger block spills registers
        BN = SMALLEST if is_float32 else max(SMALLEST, min(BLOCK, triton.next_power_of_2(P)))
        if P % BN:
            raise ValueError(f"pages have {P} tokens, but must have a multiple of {BN}. Use 128")
        BD, warps = max(SMALLEST, triton.next_power_of_2(D)), 8 if is_float32 else 4
        sizes = {"H": H, "KV": KV, "P": P, "D": D, "BD": BD, "BM": TILE, "num_warps": warps}
        _write[(len(pieces.tiles), KV)](qkv, keys, values, *pieces, **sizes)
        seen = {"WINDOW": reach.window, "CAP": reach.cap, "ALIBI": reach.alibi}
        _attend[(len(pieces.tiles), H)](qkv, keys, values, *pieces, out, scale, BN=BN, **seen, **sizes)
        return out

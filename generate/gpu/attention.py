"""Attention of the two kinds of step of a GPU: decodes, one token per row, and prompts, packed one after the other.

Each kind has a plain PyTorch implementation, the tests' oracle, and a fast one; `choose.py` takes the fast one where it
agrees. A packed row holds H heads of queries, then KV of keys, then KV of values; pools are [pages, KV, P, D]. H is a
multiple of KV, and head h of the queries sees head h // (H / KV) of the keys. Unused rows of a decode have context
length 0 and page 0; they write to page 0 at most, which belongs to no sequence.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from generate.cpu.attention import attend_seen, slopes
from models.architecture import FULL, Reach

# Bounds on the memory of plain decodes, which gather whole block tables in float32.
ROWS_AT_ONCE, PLAIN_TOKENS = 32, 1 << 15
TILE = 64  # queries of a prompt that are computed together


class DecodeRows(NamedTuple):
    """The rows of a decode. context_lens: int64 [n], with the new token, 0 for unused. block_tables: int64 [n, pages]."""

    context_lens: Tensor
    block_tables: Tensor


class DecodeAttention(Protocol):
    """Attention of one new token per row over the row's pages."""

    name: str

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float, reach: Reach = FULL
    ) -> Tensor:
        """Append the new keys and values to the pages; return the rows' attention [n, H * D], finite in unused rows.

        qkv: [n, (H + 2 KV) * D]. keys, values: one layer's pools. `reach` is as in the CPU's `Attention`.
        Reads nothing back, so that a graph can hold it.
        """
        ...


class PromptAttention(Protocol):
    """Attention of pieces of prompts over their pages."""

    name: str

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, pieces: Pieces, scale: float, reach: Reach = FULL
    ) -> Tensor:
        """Write the new keys and values into their pages; return the new tokens' attention [M, H * D].

        qkv: [M, (H + 2 KV) * D]. keys, values: one layer's pools. Rows of padding are anything.
        """
        ...


def split_heads(qkv: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (n, H, D), keys and values (n, KV, D) of packed rows (n, (H + 2 KV) * D)."""
    _, KV, _, D = keys.shape
    heads = qkv.view(len(qkv), -1, D)  # (n, H + 2 KV, D)
    return heads[:, : -2 * KV], heads[:, -2 * KV : -KV], heads[:, -KV:]


class TorchDecode:
    """The plain implementation: gather every page of the block tables in float32 and mask what is behind a context."""

    name = "torch"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float, reach: Reach = FULL
    ) -> Tensor:
        P = keys.shape[2]
        q, k, v = split_heads(qkv, keys)
        last = (rows.context_lens - 1).clamp(min=0)
        page = rows.block_tables.gather(1, (last // P)[:, None])[:, 0]
        keys[page, :, last % P] = k
        values[page, :, last % P] = v
        out = torch.empty(q.shape, dtype=qkv.dtype, device=qkv.device)
        step = min(ROWS_AT_ONCE, max(1, PLAIN_TOKENS // (rows.block_tables.shape[1] * P)))
        for first in range(0, len(qkv), step):
            part = slice(first, first + step)
            own = DecodeRows(last[part] + 1, rows.block_tables[part])
            out[part] = self._attend(q[part], keys, values, own, scale, reach)
        return out.view(len(qkv), -1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float, reach: Reach) -> Tensor:
        _, KV, P, D = keys.shape
        context_lens, tables = rows
        if tables.is_cpu:  # a graph may not read the longest context back
            tables = tables[:, : math.ceil(int(context_lens.max()) / P)]
        n, pages = tables.shape
        past_k, past_v = (  # (n, pages, KV, P, D) -> (n, KV, pages * P, D)
            pool[tables].transpose(1, 2).reshape(n, KV, pages * P, D).float() for pool in (keys, values)
        )
        at = torch.arange(pages * P, device=q.device)
        is_past = at < context_lens[:, None]  # (n, pages * P)
        if reach.window:
            is_past &= at >= context_lens[:, None] - reach.window
        groups = q.reshape(n, KV, -1, D).float()  # (n, H, D) -> (n, KV, H / KV, D)
        scores = (past_k @ groups.transpose(2, 3)).transpose(2, 3) * scale  # (n, KV, H / KV, pages * P)
        scores = reach.cap * (scores / reach.cap).tanh() if reach.cap else scores
        if reach.alibi:
            fall = (at + 1 - context_lens[:, None])[:, None, None]
            scores = scores + slopes(reach.alibi, q.shape[1], q.device).view(KV, -1, 1) * fall
        weights = scores.masked_fill(~is_past[:, None, None], -torch.inf).softmax(-1)
        past_v = past_v.masked_fill(~is_past[:, None, :, None], 0)  # a fresh page may hold NaN, and 0 * NaN is NaN
        return (weights @ past_v).reshape(q.shape)  # (n, KV, H / KV, D) -> (n, H, D)


class Pieces(NamedTuple):
    """The rows of a packed step of prompts, cut into tiles of at most TILE new tokens of one piece.

    tiles: int64 [n, 4], of each: its first row, its number of rows (0: unused), the position of its first token, and
        where the pages of its piece begin in `pages`.
    pages: int64, those of each piece up to its last token, piece after piece.
    Rows in no tile are padding.
    """

    tiles: Tensor
    pages: Tensor


def cut(
    computed: Iterable[int], counts: Iterable[int], pages: Iterable[list[int]], page_size: int
) -> tuple[list[int], list[int]]:
    """Return the numbers of `Pieces` for pieces of `counts[i]` tokens behind `computed[i]`, in pages `pages[i]`."""
    tiles: list[int] = []
    used: list[int] = []
    row = 0
    for past, count, own in zip(computed, counts, pages):
        for start in range(0, count, TILE):
            tiles += row + start, min(TILE, count - start), past + start, len(used)
        used += own[: math.ceil((past + count) / page_size)]
        row += count
    return tiles, used


class TorchPrompts:
    """The plain implementation: SDPA in float32, tile after tile. It reads the tiles back."""

    name = "torch"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, pieces: Pieces, scale: float, reach: Reach = FULL
    ) -> Tensor:
        P = keys.shape[2]
        q, k, v = split_heads(qkv, keys)
        out = torch.zeros(q.shape, dtype=qkv.dtype, device=qkv.device)
        for first, count, position, start in pieces.tiles.tolist():
            if count:  # tiles of a piece are in order: the past of each is written
                rows = slice(first, first + count)
                t = torch.arange(position + count, device=qkv.device)
                pages, offsets = pieces.pages[start + t // P], t % P
                keys[pages[position:], :, offsets[position:]] = k[rows]
                values[pages[position:], :, offsets[position:]] = v[rows]
                past = slice(max(0, position + 1 - reach.window) if reach.window else 0, None)  # others may be NaN
                seen = pages[past], slice(None), offsets[past]
                out[rows] = causal(q[rows], keys[seen], values[seen], scale, reach).to(out.dtype)
        return out.view(len(qkv), -1)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, reach: Reach = FULL) -> Tensor:
    """Return the attention (t, H, D) of the last t of T tokens, in float32 or more.

    q: (t, H, D). k, v: (T, KV, D).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.transpose(0, 1)[None].to(dtype) for x in (q, k, v))  # (T, H, D) -> (1, H, T, D)
    return attend_seen(q, k, v, scale, reach)[0].transpose(0, 1)

"""Attention of the two kinds of step of a GPU: decodes, one token per row, and prompts, packed one after the other.

Each kind has a plain PyTorch implementation, the tests' oracle, and a fast one; `choose.py` takes the fast one where it
agrees. A packed row holds H heads of queries, then KV of keys, then KV of values; pools are [pages, KV, P, D]. H is a
multiple of KV, and head h of the queries sees head h // (H / KV) of the keys. Unused rows of a decode have context length 0 and page 0; they write to page 0 at
most, which belongs to no sequence.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from generate.cpu.attention import attend_seen
from models.architecture import FULL, Reach

# Bounds on the memory that a long context takes beside the pools.
ROWS_AT_ONCE, PLAIN_TOKENS = 32, 1 << 15  # of plain decodes, which gather whole block tables in float32
SCORES_AT_ONCE = 1 << 22  # of plain prompts: queries times keys of a head


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
        weights = scores.masked_fill(~is_past[:, None, None], -torch.inf).softmax(-1)
        past_v = past_v.masked_fill(~is_past[:, None, :, None], 0)  # a fresh page may hold NaN, and 0 * NaN is NaN
        return (weights @ past_v).reshape(q.shape)  # (n, KV, H / KV, D) -> (n, H, D)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of a packed step of prompts: n pieces, their new tokens one after the other.

    cu_seqlens_q, cu_seqlens_k: on the host, piece i has rows cu_seqlens_q[i]:cu_seqlens_q[i+1] and, with its past,
        cu_seqlens_k[i+1] - cu_seqlens_k[i] tokens. `cu_seqlens` holds both as int32 on the device, [2, n+1].
    pages, offsets: int64 on the device, the slots of each new token's key and value.
    past: int64 [2, cu_seqlens_k[n]] on the device, page and offset of every token of every piece; None when no piece
        has a past.
    Rows behind cu_seqlens_q[n] are padding.
    """

    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    cu_seqlens: Tensor
    pages: Tensor
    offsets: Tensor
    past: Tensor | None


class PlainPrompts:
    """SDPA in float32, piece after piece, over the piece's own keys only."""

    name = "sdpa"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float, reach: Reach = FULL
    ) -> Tensor:
        """Write the new tokens' keys and values into their pages; return the new tokens' attention [M, H * D].

        qkv: [M, (H + 2 KV) * D]. `reach` is as in the CPU's `Attention`.
        """
        rows = prompts.cu_seqlens_q[-1]
        q, k, v = split_heads(qkv[:rows], keys)
        keys[prompts.pages, :, prompts.offsets] = k
        values[prompts.pages, :, prompts.offsets] = v
        if prompts.past is not None:
            page, offset = prompts.past
            k, v = keys[page, :, offset], values[page, :, offset]  # (all tokens, KV, D)
        y = self._attend(q, k, v, prompts, scale, reach).reshape(rows, -1)  # (rows, H, D) -> (rows, H * D)
        out = torch.zeros(len(qkv), y.shape[1], dtype=qkv.dtype, device=qkv.device)
        out[:rows] = y
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, scale: float, reach: Reach) -> Tensor:
        out = torch.empty_like(q)
        pieces = zip(itertools.pairwise(prompts.cu_seqlens_q), itertools.pairwise(prompts.cu_seqlens_k))
        for (first, last), (start, end) in pieces:
            out[first:last] = causal(q[first:last], k[start:end], v[start:end], scale, reach)
        return out


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, reach: Reach = FULL) -> Tensor:
    """Return the attention (t, H, D) of the last t of T tokens, in float32 or more.

    q: (t, H, D). k, v: (T, KV, D).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.transpose(0, 1)[None].to(dtype) for x in (q, k, v))  # (T, H, D) -> (1, H, T, D)
    new, whole = q.shape[2], k.shape[2]
    step = max(1, SCORES_AT_ONCE // whole)
    parts = []
    for first in range(0, new, step):  # a mask of all queries of a long prompt would take gigabytes
        part = q[:, :, first : first + step]
        end = whole - new + first + part.shape[2]  # what the part's last query sees
        start = max(0, end - part.shape[2] - reach.window + 1) if reach.window else 0
        parts.append(attend_seen(part, k[:, :, start:end], v[:, :, start:end], scale, reach))
    return torch.cat(parts, 2)[0].transpose(0, 1)


class FlashPrompts(PlainPrompts):
    """PyTorch's flash attention over all pieces in one call; 16-bit, on a GPU."""

    name = "flash"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, scale: float, reach: Reach) -> Tensor:
        if reach != FULL:
            return super()._attend(q, k, v, prompts, scale, reach)
        cuts = prompts.cu_seqlens_q, prompts.cu_seqlens_k
        queries, keys = (max(b - a for a, b in itertools.pairwise(cut)) for cut in cuts)
        # With fewer KV heads than query heads and a maximum of one query per piece, it would split the sums by the batch
        # size, so the maximum passed is at least two.
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, *prompts.cu_seqlens, max(2, queries), keys, 0.0, True, False, scale=scale
        )[0]
        return out

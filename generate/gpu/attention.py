"""Attention of the two kinds of step of a GPU: decodes, one token per row, and prompts, packed one after the other.

Each kind has a plain PyTorch implementation, the tests' oracle, and a fast one; `choose.py` takes the fast one where it
agrees. Pools are [pages, H, P, D]. Unused rows of a decode have context length 0 and page 0; they write to page 0 at
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
from torch.nn import functional as F

ROWS_AT_ONCE = 32  # of the plain implementation, which gathers whole block tables


class DecodeRows(NamedTuple):
    """The rows of a decode. context_lens: int64 [n], with the new token, 0 for unused. block_tables: int64 [n, pages]."""

    context_lens: Tensor
    block_tables: Tensor


class DecodeAttention(Protocol):
    """Attention of one new token per row over the row's pages."""

    name: str

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
        """Append the new keys and values to the pages; return the rows' attention [n, C], finite in unused rows.

        qkv: [n, 3C]. keys, values: one layer's pools. Reads nothing back, so that a graph can hold it.
        """
        ...


class TorchDecode:
    """The plain implementation: gather every page of the block tables in float32 and mask what is behind a context."""

    name = "torch"

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
        _, H, P, D = keys.shape
        q, k, v = qkv.view(-1, 3, H, D).unbind(1)  # (n, 3C) -> 3 of (n, H, D)
        last = (rows.context_lens - 1).clamp(min=0)
        page = rows.block_tables.gather(1, (last // P)[:, None])[:, 0]
        keys[page, :, last % P] = k
        values[page, :, last % P] = v
        out = torch.empty(len(qkv), H, D, dtype=qkv.dtype, device=qkv.device)
        for first in range(0, len(qkv), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            out[part] = self._attend(q[part], keys, values, DecodeRows(last[part] + 1, rows.block_tables[part]), scale)
        return out.view(-1, H * D)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows, scale: float) -> Tensor:
        _, H, P, D = keys.shape
        context_lens, tables = rows
        if tables.is_cpu:  # a graph may not read the longest context back
            tables = tables[:, : math.ceil(int(context_lens.max()) / P)]
        n, pages = tables.shape
        past_k, past_v = (  # (n, pages, H, P, D) -> (n, H, pages * P, D)
            pool[tables].transpose(1, 2).reshape(n, H, pages * P, D).float() for pool in (keys, values)
        )
        is_past = torch.arange(pages * P, device=q.device) < context_lens[:, None]  # (n, pages * P)
        scores = (past_k @ q.float()[..., None])[..., 0] * scale  # (n, H, pages * P)
        weights = scores.masked_fill(~is_past[:, None], -torch.inf).softmax(-1)
        past_v = past_v.masked_fill(~is_past[:, None, :, None], 0)  # a fresh page may hold NaN, and 0 * NaN is NaN
        return (weights[:, :, None] @ past_v)[:, :, 0]  # (n, H, D)


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

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float) -> Tensor:
        """Write the new tokens' keys and values into their pages; return the new tokens' attention [M, C]."""
        _, H, _, D = keys.shape
        rows = prompts.cu_seqlens_q[-1]
        q, k, v = qkv[:rows].view(-1, 3, H, D).unbind(1)  # (M, 3C) -> 3 of (M, H, D)
        keys[prompts.pages, :, prompts.offsets] = k
        values[prompts.pages, :, prompts.offsets] = v
        if prompts.past is not None:
            page, offset = prompts.past
            k, v = keys[page, :, offset], values[page, :, offset]  # (all tokens, H, D)
        out = torch.zeros(len(qkv), H * D, dtype=qkv.dtype, device=qkv.device)
        out[:rows] = self._attend(q, k, v, prompts, scale).reshape(rows, H * D)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, scale: float) -> Tensor:
        out = torch.empty_like(q)
        pieces = zip(itertools.pairwise(prompts.cu_seqlens_q), itertools.pairwise(prompts.cu_seqlens_k))
        for (first, last), (start, end) in pieces:
            out[first:last] = causal(q[first:last], k[start:end], v[start:end], scale)
        return out


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the attention (t, H, D) of the last t of T tokens, q (t, H, D), k and v (T, H, D), in float32 or more."""
    q, k, v = (  # (T, H, D) -> (1, H, T, D)
        x.transpose(0, 1)[None].to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v)
    )
    new, whole = q.shape[2], k.shape[2]
    seen = torch.ones(new, whole, dtype=torch.bool, device=q.device).tril(whole - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)[0].transpose(0, 1)


class FlashPrompts(PlainPrompts):
    """PyTorch's flash attention over all pieces in one call; 16-bit, on a GPU."""

    name = "flash"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, scale: float) -> Tensor:
        cuts = prompts.cu_seqlens_q, prompts.cu_seqlens_k
        longest = [max(b - a for a, b in itertools.pairwise(cut)) for cut in cuts]
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, *prompts.cu_seqlens, *longest, 0.0, True, False, scale=scale
        )[0]
        return out

"""Attention of the two kinds of step of a GPU: decodes, one token a row, and prompts, packed one after the other.

Each kind has the plain PyTorch way, which is the tests' oracle and serves where nothing faster does, and a fast one,
which `choose.py` lets serve. Pages hold [pages, H, P, D]. Padding rows of a
decode have length 0 and page 0; they write to page 0 at most, which belongs to nobody.

It must not know layers, requests, or who owns a page.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS_AT_ONCE = 32  # of the plain way, which gathers whole page tables


class DecodeAttention(Protocol):
    """Attention of one new token a row over the row's pages."""

    name: str

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, tables: Tensor, scale: float
    ) -> Tensor:
        """Append the new keys and values to the pages; return the rows' attention [n, C].

        qkv: [n, 3C]. keys, values: one layer's pools. lengths: int64 [n], the new token included, 0 for padding,
        whose result is finite. tables: int64 [n, max pages]. Reads nothing back, so that a graph can hold it.
        """
        ...


class TorchDecode:
    """The plain way: gather every page of the table, float32, with what is not there masked."""

    name = "torch"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, tables: Tensor, scale: float
    ) -> Tensor:
        _, H, P, D = keys.shape
        q, k, v = qkv.view(-1, 3, H, D).unbind(1)  # (n, H, D) each
        last = (lengths - 1).clamp(min=0)
        page = tables.gather(1, (last // P)[:, None])[:, 0]
        keys[page, :, last % P] = k
        values[page, :, last % P] = v
        out = torch.empty(len(qkv), H, D, dtype=qkv.dtype, device=qkv.device)
        for first in range(0, len(qkv), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            out[part] = self._attend(q[part], keys, values, last[part] + 1, tables[part], scale)
        return out.view(-1, H * D)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, tables: Tensor, scale: float) -> Tensor:
        _, H, P, D = keys.shape
        if tables.is_cpu:  # a graph may not ask how long the longest is
            tables = tables[:, : math.ceil(int(lengths.max()) / P)]
        rows, pages = tables.shape
        past, content = (pool[tables].transpose(1, 2).reshape(rows, H, pages * P, D).float() for pool in (keys, values))
        there = torch.arange(pages * P, device=q.device) < lengths[:, None]  # (rows, pages * P)
        scores = (past @ q.float()[..., None])[..., 0] * scale
        weights = scores.masked_fill(~there[:, None], -torch.inf).softmax(-1)
        content = content.masked_fill(~there[:, None, :, None], 0)  # a fresh page may hold NaN
        return (weights[:, :, None] @ content)[:, :, 0]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Who owns which rows of a packed step of prompts: n pieces, their new tokens one after the other.

    queries, contexts: on the host, piece i has rows queries[i]:queries[i+1] and, its past included,
        contexts[i+1] - contexts[i] tokens. `cuts` holds both as int32 on the device, [2, n+1].
    pages, offsets: int64 on the device, where each new token's key and value go.
    past: int64 [2, contexts[n]] on the device, page and offset of every token of every piece; None when no piece
        has a past.
    Rows behind queries[n] are padding.
    """

    queries: list[int]
    contexts: list[int]
    cuts: Tensor
    pages: Tensor
    offsets: Tensor
    past: Tensor | None


class PlainPrompts:
    """SDPA in float32, piece after piece, over the piece's own keys only."""

    name = "sdpa"

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, scale: float) -> Tensor:
        """Write the new tokens' keys and values into their pages; return the new tokens' attention [M, C]."""
        _, H, _, D = keys.shape
        rows = prompts.queries[-1]
        q, k, v = qkv[:rows].view(-1, 3, H, D).unbind(1)  # (M, H, D) each
        keys[prompts.pages, :, prompts.offsets] = k
        values[prompts.pages, :, prompts.offsets] = v
        if prompts.past is not None:
            page, offset = prompts.past
            k, v = keys[page, :, offset], values[page, :, offset]  # (contexts, H, D)
        out = torch.zeros(len(qkv), H * D, dtype=qkv.dtype, device=qkv.device)
        out[:rows] = self._attend(q, k, v, prompts, scale).reshape(rows, H * D)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, scale: float) -> Tensor:
        out = torch.empty_like(q)
        for i in range(len(prompts.queries) - 1):
            new = slice(prompts.queries[i], prompts.queries[i + 1])
            whole = slice(prompts.contexts[i], prompts.contexts[i + 1])
            out[new] = causal(q[new], k[whole], v[whole], scale)
        return out


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the attention (t, H, D) of the last t of T tokens, q (t, H, D), k and v (T, H, D), in float32 or more."""
    q, k, v = (x.transpose(0, 1)[None].to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    new, whole = q.shape[2], k.shape[2]
    seen = torch.ones(new, whole, dtype=torch.bool, device=q.device).tril(whole - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)[0].transpose(0, 1)


class FlashPrompts(PlainPrompts):
    """PyTorch's flash attention over all pieces in one call; 16-bit, on a GPU."""

    name = "flash"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prompts: Prompts, scale: float) -> Tensor:
        longest = [max(b - a for a, b in itertools.pairwise(cuts)) for cuts in (prompts.queries, prompts.contexts)]
        return torch.ops.aten._flash_attention_forward(
            q, k, v, prompts.cuts[0], prompts.cuts[1], *longest, 0.0, True, False, scale=scale
        )[0]

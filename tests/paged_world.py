"""What the tests of attention share: sequences on scattered pages of NaN, fed step by step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from generate.cpu.attention import Attention, PackedRows, stale
from generate.memory import kv_row_size

# bfloat16: its own rounding of weights and results; 8-bit pools: queries and weights are rounded to 15 bits
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.int8: 5e-4}
NAN = math.nan


class World:
    """Pools full of NaN, sequences whose pages lie in random order, and a scripted way to feed their tokens."""

    def __init__(
        self,
        lengths: list[int],
        H: int,
        D: int,
        P: int,
        dtype: torch.dtype,
        seed: int = 0,
        KV: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.H, self.KV, self.D, self.P, self.dtype = H, KV or H, D, P, dtype
        self.kv_dtype = kv_dtype or dtype
        counts = [math.ceil(length / P) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=self.generator).tolist()
        self.block_tables = torch.full((len(lengths), max(counts) + 1), -7, dtype=torch.int32)
        for i, count in enumerate(counts):
            self.block_tables[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.pages = sum(counts) + 2
        self.width = (H + 2 * self.KV) * D
        self.tokens = [torch.randn(length, self.width, generator=self.generator).to(dtype) for length in lengths]
        self.clear()

    def clear(self) -> None:
        self.done = [0] * len(self.tokens)
        shape = (self.pages, self.KV, self.P, kv_row_size(self.D, self.kv_dtype))
        self.keys, self.values = (stale(shape, self.kv_dtype) for _ in range(2))

    def step(self, attention: Attention, new: dict[int, int], padding: int = 0) -> dict[int, Tensor]:
        """Feed new[i] further tokens of sequence i in one call and return its rows [new[i], H * D]."""
        parts, cu_seqlens, context_lens = [], [0], []
        for i, count in new.items():
            parts.append(self.tokens[i][self.done[i] : self.done[i] + count])
            self.done[i] += count
            cu_seqlens.append(cu_seqlens[-1] + count)
            context_lens.append(self.done[i])
        parts.append(torch.full((padding, self.width), NAN, dtype=self.dtype))
        rows = PackedRows(
            torch.tensor(cu_seqlens, dtype=torch.int32),
            torch.tensor(context_lens, dtype=torch.int32),
            self.block_tables[list(new)].contiguous(),
        )
        qkv, scale = torch.cat(parts), self.D**-0.5
        out = attention(qkv, self.keys, self.values, rows, scale)
        assert out.shape == (len(qkv), self.H * self.D)
        assert out.dtype == self.dtype
        assert out[cu_seqlens[-1] :].isfinite().all()
        return {i: out[a:b] for i, a, b in zip(new, cu_seqlens, cu_seqlens[1:])}

    def run(self, attention: Attention, steps: list[dict[int, int]], padding: int = 0) -> list[Tensor]:
        """Clear the pools, run all steps, return each sequence's rows together."""
        self.clear()
        rows: list[list[Tensor]] = [[] for _ in self.tokens]
        for new in steps:
            for i, part in self.step(attention, new, padding).items():
                rows[i].append(part)
        return [torch.cat(parts) if parts else torch.empty(0) for parts in rows]


def assert_close(
    got: list[Tensor], expected: list[Tensor], dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> None:
    atol = max(TOLERANCE[dtype], TOLERANCE[kv_dtype or dtype])
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.01, atol=atol)

"""Attention of one step over KV pages: append the new keys and values, then let each new token see its past.

There are two implementations of one interface. `CAttention` calls paged_attention.c and serves on a CPU.
`TorchAttention` is plain PyTorch on any device: it is the oracle of the tests, and serves where the C file cannot be
compiled.

It must not know layers, requests, or who owns a page: it trusts the page numbers that it gets.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from generate import memory
from generate.cpu import linear
from generate.cpu.adapters import AdapterRows
from generate.cpu.declarations import declarations
from generate.cpu.kernels import KernelError, load_library
from generate.cpu.team import team
from models.architecture import FULL, Reach

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_attention.c")
ENTRIES = {  # by the formats of the rows and of the pools
    (torch.float32, torch.float32): "paged_attention_f32",
    (torch.bfloat16, torch.bfloat16): "paged_attention_bf16",
    (torch.float32, torch.int8): "paged_attention_f32_int8",
    (torch.bfloat16, torch.int8): "paged_attention_bf16_int8",
}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a packed step: n sequences, their new tokens one after the other.

    cu_seqlens: int32 [n+1], sequence i has rows cu_seqlens[i]:cu_seqlens[i+1], at least one. Rows behind cu_seqlens[n]
        are padding.
    context_lens: int32 [n], tokens of i's context, its new ones included.
    block_tables: int32 [n, max_pages], i's pages in order; entries behind its context are never read.
    adapters: of the rows that have one, None if none has.
    """

    cu_seqlens: Tensor
    context_lens: Tensor
    block_tables: Tensor
    adapters: AdapterRows | None = None

    def __post_init__(self) -> None:
        for name in ("cu_seqlens", "context_lens", "block_tables"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tensor.dtype}. Pass a contiguous int32 tensor")
        n = self.context_lens.shape[0]
        if self.cu_seqlens.shape != (n + 1,) or self.block_tables.dim() != 2 or self.block_tables.shape[0] != n:
            raise ValueError(
                f"cu_seqlens {tuple(self.cu_seqlens.shape)}, context_lens {tuple(self.context_lens.shape)} and "
                f"block_tables {tuple(self.block_tables.shape)} do not fit. Pass [n+1], [n] and [n, max_pages]"
            )


class Attention(Protocol):
    """Attention of the new tokens of a step over their sequences' pages.

    The order of the values inside one (page, head) tile is the implementation's own: pages that one has written
    are read by the same one only.
    """

    name: str

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, reach: Reach = FULL
    ) -> Tensor:
        """Write the new tokens' keys and values into their pages; return the new tokens' attention.

        qkv: [M, (H + 2 KV) * D], H heads of queries, KV of keys and KV of values of the packed row. keys, values: one
        layer's pools [pages, KV, P, D], of qkv's dtype, or int8 [pages, KV, P, D + 4], see `quantize`. H is a multiple
        of KV; head h of the queries sees head h // (H / KV) of the keys. Returns [M, H * D]
        with finite values in padding rows. A token at position p sees keys 0..p, or as far back as its `reach`. With a
        cap, scores x become cap * tanh(x / cap). With ALiBi, they then fall by the head's slope for each token between.
        A token's result depends on its own sequence alone.
        """
        ...


def quantize(x: Tensor) -> Tensor:
    """Return x [..., D] as int8 [..., D + 4]: x / scale, and behind it the float32 scale, the largest magnitude / 127.

    A row that is not finite gets the scale NaN, as attention_int8.h does it.
    """
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    usable = most.isfinite() & (most > 1e-30)
    numbers = torch.where(usable, wide * (127 / most), 0).round().to(torch.int8)
    scale = torch.where(usable, most / 127, torch.where(most.isfinite(), 0, math.nan))
    return torch.cat((numbers, scale.view(torch.int8)), -1)


def dequantize(rows: Tensor) -> Tensor:
    """Return what `quantize` was given, as float32."""
    scale = rows[..., -memory.SCALE_BYTES :].contiguous().view(torch.float32)
    return rows[..., : -memory.SCALE_BYTES] * scale


def slopes(alibi: int, heads: int, device: torch.device) -> Tensor:
    """Return how far the scores of each head fall with each token of distance, float32 [H], as `Reach.alibi` says."""
    h = torch.arange(1, heads + 1, device=device)
    return torch.exp2(-torch.where(h <= alibi, 8 * h, 8 * (h - alibi) - 4) / alibi)


def attend_seen(q: Tensor, k: Tensor, v: Tensor, scale: float, reach: Reach = FULL) -> Tensor:
    """Return the attention (1, H, t, D) of the last t of T tokens, each to the keys that it sees.

    q: (1, H, t, D). k, v: (1, KV, T, D).
    """
    (H, new), (KV, whole), (window, cap, alibi) = q.shape[1:3], k.shape[1:3], reach
    mask = None
    if window or cap or alibi or 1 < new < whole:
        mask = torch.ones(new, whole, dtype=torch.bool, device=q.device).tril(whole - new)
        mask = mask.triu(whole - new - window + 1) if window else mask
    if alibi and mask is not None:  # (H, t, T)
        at = torch.arange(whole, device=q.device)
        fall = slopes(alibi, H, q.device).to(q.dtype)[:, None, None] * (at - at[whole - new :, None])
        mask = torch.where(mask, fall, -math.inf)
    if cap and mask is not None:
        k, v = (x.repeat_interleave(H // KV, 1) for x in (k, v))
        scores = cap * (q @ k.transpose(2, 3) * (scale / cap)).tanh()  # (1, H, t, T)
        scores = scores + mask if alibi else scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v
    is_causal = mask is None and new > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=KV < H)


class TorchAttention:
    """The plain implementation: for each sequence, gather its pages and call float32 SDPA.

    It always computes in float32 and never pads to a common length: bfloat16 SDPA on a CPU is several times slower,
    and with padding a neighbor could change a sequence's sums.
    """

    name = "torch"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, reach: Reach = FULL
    ) -> Tensor:
        _, KV, P, width = keys.shape
        small = keys.dtype == torch.int8
        D = width - memory.SCALE_BYTES if small else width
        H = qkv.shape[1] // D - 2 * KV
        cu_seqlens, context_lens = rows.cu_seqlens.tolist(), rows.context_lens.tolist()
        heads = qkv.view(len(qkv), -1, D)  # (M, H + 2 KV, D)
        q, k, v = heads[:, :H], heads[:, H : H + KV], heads[:, H + KV :]
        out = torch.empty(len(qkv), H * D, dtype=qkv.dtype, device=qkv.device)
        out[cu_seqlens[-1] :] = 0
        for i, length in enumerate(context_lens):
            first, last = cu_seqlens[i], cu_seqlens[i + 1]
            table = rows.block_tables[i, : math.ceil(length / P)].long()
            position = length - (last - first)
            positions = torch.arange(position, length, device=qkv.device)  # (T)
            for pool, new in ((keys, k[first:last]), (values, v[first:last])):
                pool[table[positions // P], :, positions % P] = quantize(new) if small else new
            # Pages before all windows may hold NaN.
            hidden = max(0, position + 1 - reach.window) // P if reach.window else 0
            past_k, past_v = (  # (pages, KV, P, width) -> (1, KV, length - hidden * P, D)
                dequantize(past) if small else past.float()
                for past in (
                    pool[table[hidden:]].transpose(0, 1).reshape(KV, -1, width)[None, :, : length - hidden * P]
                    for pool in (keys, values)
                )
            )
            new = q[first:last].transpose(0, 1)[None].float()  # (1, H, T, D)
            y = attend_seen(new, past_k, past_v, scale, reach)
            out[first:last] = y[0].transpose(0, 1).reshape(last - first, H * D)  # (1, H, T, D) -> (T, H * D)
        return out


class CAttention:
    """paged_attention.c: no gather, no mask, no padding, threads over (sequence, head, block of queries).

    A token's result is the same to the bit alone, in a batch, in a chunk of any size and with any number of
    threads. Raises KernelError where the file cannot be compiled or loaded.
    """

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, source: Path = SOURCE) -> None:
        library = team().join(load_library(source))
        self.constants = declarations().constants
        self.page_multiple, self.max_head_size = self.constants["PAGE_MULTIPLE"], self.constants["MAX_HEAD_SIZE"]
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.library, self.name = library, "c"
        if self.kv_dtype == torch.bfloat16:
            with contextlib.suppress(
                KernelError
            ):  # no way of linear layers runs here; attention has one for any machine
                self.use(linear.bfloat16_way())
        self.entry = getattr(library, ENTRIES[self.dtype, self.kv_dtype])

    def use(self, way: str) -> None:
        """Multiply bfloat16 heads of a multiple of 64 in this way of linear layers from here on, in the whole process.

        Where the kernel has no instructions for that, it multiplies them as all other heads.
        """
        if self.library.paged_attention_use(self.constants[way.upper()]):
            self.name = f"c-{way}"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, reach: Reach = FULL
    ) -> Tensor:
        M, pages, KV, P, D = len(qkv), *self._head_shape(keys)
        H = qkv.shape[1] // D - 2 * KV
        self._check(qkv, keys, values)
        out = torch.empty(M, H * D, dtype=self.dtype)
        code = self.entry(
            qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            rows.cu_seqlens.data_ptr(), rows.context_lens.data_ptr(), rows.block_tables.data_ptr(),
            len(rows.context_lens), M, H, KV, D, P, rows.block_tables.shape[1], pages, scale, *reach,
        )  # fmt: skip
        if code:
            raise self.error(code, rows, M, P, pages)
        return out

    def _head_shape(self, pool: Tensor) -> tuple[int, int, int, int]:
        """Return pages, KV, P and D of a pool."""
        pages, KV, P, width = pool.shape
        return pages, KV, P, width - memory.kv_row_size(0, self.kv_dtype)

    def _check(self, qkv: Tensor, keys: Tensor, values: Tensor) -> None:
        """Refuse tensors with which the C code would read or write outside their memory."""
        _, KV, P, D = self._head_shape(keys)
        H, rest = divmod(qkv.shape[1] - 2 * KV * D, D)
        if P % self.page_multiple:
            raise ValueError(f"the pages hold {P} tokens. Use a multiple of {self.page_multiple}")
        if self.max_head_size < D:
            raise ValueError(
                f"the heads have {D} values, at most {self.max_head_size} fit. Set EB_KERNELS=off to use PyTorch"
            )
        if values.shape != keys.shape or rest or H < 1 or H % KV:
            raise ValueError(
                f"qkv {tuple(qkv.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit. "
                "Pass [M, (H + 2*KV)*D], H a multiple of KV, and [pages, KV, P, D] twice"
            )
        for tensor, dtype in ((qkv, self.dtype), (keys, self.kv_dtype), (values, self.kv_dtype)):
            if tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
                raise ValueError(f"a {tensor.dtype} tensor on {tensor.device}. Pass contiguous {dtype} on the CPU")

    def error(self, code: int, rows: PackedRows, M: int, P: int, pages: int) -> Exception:
        """Return the exception for a code of the C function."""
        if code == self.constants["BAD_ROWS"]:
            return ValueError(
                f"cu_seqlens {rows.cu_seqlens.tolist()} and context_lens {rows.context_lens.tolist()} do not fit {M} "
                f"rows and block_tables of {rows.block_tables.shape[1]} pages of {P} tokens"
            )
        if code == self.constants["BAD_PAGE"]:
            return ValueError(f"a block table names a page outside 0..{pages - 1}")
        return MemoryError("no memory for the scores of a step")


def make_attention(
    dtype: torch.dtype, device: torch.device | str = "cpu", kv_dtype: torch.dtype | None = None
) -> Attention:
    """Return the fastest attention that works here for qkv of `dtype` and pools of `kv_dtype` on `device`.

    The C kernel must agree with TorchAttention on a small step first. Where it cannot be used, one warning gives the
    reason. `EB_KERNELS=off` in the environment selects TorchAttention.
    """
    if torch.device(device).type != "cpu" or (dtype, kv_dtype or dtype) not in ENTRIES:
        return TorchAttention()
    if os.environ.get("EB_KERNELS") == "off":
        return TorchAttention()
    try:
        attention = CAttention(dtype, kv_dtype)
        self_test(attention, dtype, kv_dtype or dtype)
    except (KernelError, OSError) as error:
        log.warning("attention falls back to PyTorch, which is several times slower: %s", error)
        return TorchAttention()
    return attention


def self_test(attention: Attention, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Compare `attention` with TorchAttention on a small ragged step. Raises KernelError where they differ."""
    generator = torch.Generator().manual_seed(0)
    KV, P = 2, 16
    for H, D in ((2, 8), (2, 64), (6, 64), (6, 128)):
        rows = PackedRows(
            torch.tensor([0, 1, 20, 21], dtype=torch.int32),
            torch.tensor([1, 19, 33], dtype=torch.int32),
            torch.tensor([[4, -1, -1], [0, 5, -1], [3, 1, 2]], dtype=torch.int32),
        )
        past = PackedRows(
            torch.tensor([0, 32], dtype=torch.int32),
            torch.tensor([32], dtype=torch.int32),
            torch.tensor([[3, 1]], dtype=torch.int32),
        )
        steps = [
            (step, torch.randn(M, (H + 2 * KV) * D, generator=generator).to(dtype))
            for step, M in ((past, 32), (rows, 23))
        ]
        results = []
        for implementation in (attention, TorchAttention()):
            shape = (6, KV, P, memory.kv_row_size(D, kv_dtype))
            keys, values = (stale(shape, kv_dtype) for _ in range(2))
            outputs = [implementation(qkv, keys, values, step, D**-0.5).float() for step, qkv in steps]
            for reach in (Reach(7, 2.0), Reach(alibi=2)):
                outputs.append(implementation(steps[1][1], keys, values, rows, D**-0.5, reach).float())
            results.append(outputs)
        tolerance = 0.03 if dtype == torch.bfloat16 else 1e-3 if kv_dtype == torch.int8 else 1e-4
        for outputs, expected in zip(*results):
            error = (outputs - expected).abs().max().item()
            if not error < tolerance:  # NaN fails too
                raise KernelError(f"{attention.name} is off by {error:.2g} from PyTorch at H={H}, D={D}")


def stale(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a pool in which every number, or in an 8-bit pool every scale, is NaN."""
    if dtype == torch.int8:
        return torch.full(shape, -1, dtype=dtype)  # a float32 of ones is NaN
    return torch.full(shape, math.nan, dtype=dtype)

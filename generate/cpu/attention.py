"""Attention of one step over KV pages: append the new keys and values, then let each new token see its past.

Two implementations of one interface. `CAttention` calls paged_attention.c and serves on a CPU. `TorchAttention`
is plain PyTorch on any device: the oracle of the tests, and what serves where the C file cannot be compiled.

It must not know layers, requests, or who owns a page: it is told page numbers and trusts them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu.kernels import KernelError, load_library
from generate.cpu.team import team

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_attention.c")
ENTRIES = {torch.float32: "paged_attention_f32", torch.bfloat16: "paged_attention_bf16"}
MAX_HEAD_SIZE = 256  # of paged_attention.c's buffers
PAGE_MULTIPLE = 16  # keys stand in blocks of 16


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Who owns which rows of a packed step: n sequences, their new tokens one after the other.

    starts: int32 [n+1], sequence i owns rows starts[i]:starts[i+1], at least one. Rows behind starts[n] are
        padding.
    lengths: int32 [n], tokens of i's context, its new ones included.
    tables: int32 [n, max_pages], i's pages in order; entries behind its length are never read.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor

    def __post_init__(self) -> None:
        for name in ("starts", "lengths", "tables"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tensor.dtype}. Pass a contiguous int32 tensor")
        n = self.lengths.shape[0]
        if self.starts.shape != (n + 1,) or self.tables.dim() != 2 or self.tables.shape[0] != n:
            raise ValueError(
                f"starts {tuple(self.starts.shape)}, lengths {tuple(self.lengths.shape)} and tables "
                f"{tuple(self.tables.shape)} do not fit. Pass [n+1], [n] and [n, max_pages]"
            )


class Attention(Protocol):
    """Attention of the new tokens of a step over their sequences' pages.

    The order of the values inside one (page, head) tile is the implementation's own: pages that one has written
    are read by the same one only.
    """

    name: str

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """Write the new tokens' keys and values into their pages, return the new tokens' attention.

        qkv: [M, 3C], queries, keys and values of the packed row, C = H * D. keys, values: one layer's pools
        [pages, H, P, D]. Returns [M, C] (`out`, where given) with finite values in padding rows. A token at
        position p sees keys 0..p. Its result depends on its own sequence alone.
        """
        ...


class TorchAttention:
    """The plain way: for each sequence, gather its pages and call float32 SDPA.

    Always float32 and never padded to a common length: bfloat16 SDPA on a CPU is several times slower, and
    a padded length would let a neighbour change a sequence's sums.
    """

    name = "torch"

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, out: Tensor | None = None
    ) -> Tensor:
        _, H, P, D = keys.shape
        starts, lengths = rows.starts.tolist(), rows.lengths.tolist()
        q, k, v = qkv.view(-1, 3, H, D).unbind(1)  # (M, H, D) each
        if out is None:
            out = torch.empty(len(qkv), H * D, dtype=qkv.dtype, device=qkv.device)
        out[starts[-1] :] = 0
        for i, length in enumerate(lengths):
            first, last = starts[i], starts[i + 1]
            table = rows.tables[i, : math.ceil(length / P)].long()
            position = length - (last - first)
            places = torch.arange(position, length, device=qkv.device)
            keys[table[places // P], :, places % P] = k[first:last]
            values[table[places // P], :, places % P] = v[first:last]
            past, content = (
                pool[table].transpose(0, 1).reshape(H, -1, D)[None, :, :length].float() for pool in (keys, values)
            )  # (1, H, length, D)
            mask = None
            if last - first > 1 and position:
                mask = torch.arange(length, device=qkv.device) <= places[:, None]  # (T, length)
            y = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None].float(),  # (1, H, T, D)
                past,
                content,
                attn_mask=mask,
                is_causal=last - first > 1 and not position,
                scale=scale,
            )
            out[first:last] = y[0].transpose(0, 1).reshape(last - first, H * D)
        return out


class CAttention:
    """paged_attention.c: no gather, no mask, no padding, threads over (sequence, head, block of queries).

    A token's result is the same to the bit alone, in a batch, in a chunk of any size and with any number of
    threads. Raises KernelError where the file cannot be compiled or loaded.
    """

    def __init__(self, dtype: torch.dtype, source: Path = SOURCE) -> None:
        library = team().join(load_library(source))
        self.dtype = dtype
        self.name = "c"
        if dtype == torch.bfloat16 and library.paged_attention_has_bf16():
            self.name = "c-avx512bf16"
        self.entry = getattr(library, ENTRIES[dtype])
        self.entry.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int] * 7 + [ctypes.c_float]

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, out: Tensor | None = None
    ) -> Tensor:
        M, pages, H, P, D = len(qkv), *keys.shape
        if out is None:
            out = torch.empty(M, H * D, dtype=self.dtype)
        self._check(qkv, keys, values, out)
        wrong = self.entry(
            qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            rows.starts.data_ptr(), rows.lengths.data_ptr(), rows.tables.data_ptr(),
            len(rows.lengths), M, H, D, P, rows.tables.shape[1], pages, scale,
        )  # fmt: skip
        if wrong:
            raise self.error(wrong, rows, M, P, pages)
        return out

    def _check(self, qkv: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Refuse what would make the C code touch memory that is not its own."""
        _, H, P, D = keys.shape
        if P % PAGE_MULTIPLE:
            raise ValueError(f"pages of {P} tokens. Use a multiple of {PAGE_MULTIPLE}")
        if D > MAX_HEAD_SIZE:
            raise ValueError(f"heads of {D} values. At most {MAX_HEAD_SIZE} fit")
        if values.shape != keys.shape or qkv.shape[1] != 3 * H * D or out.shape != (len(qkv), H * D):
            raise ValueError(
                f"qkv {tuple(qkv.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} and out "
                f"{tuple(out.shape)} do not fit. Pass [M, 3*H*D], [pages, H, P, D] twice and [M, H*D]"
            )
        for tensor in (qkv, keys, values, out):
            if tensor.dtype != self.dtype or not tensor.is_contiguous() or not tensor.is_cpu:
                raise ValueError(f"a {tensor.dtype} tensor on {tensor.device}. Pass contiguous {self.dtype} on the CPU")

    def error(self, wrong: int, rows: PackedRows, M: int, P: int, pages: int) -> Exception:
        """Return what the C code's refusal `wrong` means."""
        if wrong == 1:
            return ValueError(
                f"starts {rows.starts.tolist()} and lengths {rows.lengths.tolist()} do not fit {M} rows and "
                f"tables of {rows.tables.shape[1]} pages of {P} tokens"
            )
        if wrong == 2:
            return ValueError(f"a page table names a page outside 0..{pages - 1}")
        return MemoryError("no memory for the scores of a step")


def make_attention(dtype: torch.dtype, device: torch.device | str = "cpu") -> Attention:
    """Return the fastest attention that works here for qkv of `dtype` on `device`.

    The C kernel has to agree with TorchAttention on a small step first. Where it cannot be used, one warning
    says why. `EB_KERNELS=off` in the environment asks for TorchAttention.
    """
    if torch.device(device).type != "cpu" or dtype not in ENTRIES:
        return TorchAttention()
    if os.environ.get("EB_KERNELS") == "off":
        return TorchAttention()
    try:
        attention = CAttention(dtype)
        self_test(attention, dtype)
    except (KernelError, OSError) as error:
        log.warning("attention falls back to PyTorch, which is several times slower: %s", error)
        return TorchAttention()
    return attention


def self_test(attention: Attention, dtype: torch.dtype) -> None:
    """Compare `attention` with TorchAttention on a small ragged step. Raises KernelError where they differ."""
    generator = torch.Generator().manual_seed(0)
    for D in (8, 64):
        H, P = 2, 16
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
            (step, torch.randn(M, 3 * H * D, generator=generator).to(dtype)) for step, M in ((past, 32), (rows, 23))
        ]
        results = []
        for one in (attention, TorchAttention()):
            keys, values = (torch.full((6, H, P, D), math.nan, dtype=dtype) for _ in range(2))
            results.append([one(qkv, keys, values, step, D**-0.5).float() for step, qkv in steps])
        tolerance = 0.03 if dtype == torch.bfloat16 else 1e-4
        for got, expected in zip(*results):
            error = (got - expected).abs().max().item()
            if not error < tolerance:  # NaN fails too
                raise KernelError(f"{attention.name} is off by {error:.2g} from PyTorch at D={D}")

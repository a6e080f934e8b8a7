"""Many LoRA adapters in one step: what each adds to the linear layers of its rows (adapters.c, or plain PyTorch).

An adapter is prepared once, in any thread, and is never changed. A step's rows are grouped by adapter, so that its numbers
are read once for all of them (S-LoRA, Sheng et al., 2023; Punica, Chen et al., 2023). Rows without an adapter are computed
as without any. It must not know requests, names or where an adapter comes from.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.cpu.declarations import declarations
from generate.cpu.linear import Extra, LinearLayer, make_linear
from generate.cpu.team import load, load_unless_off
from models.adapters import Adapter, LowRank
from models.architecture import Architecture

SOURCE = Path(__file__).with_name("adapters.c")
PARTS = ("qkv", "attn_proj", "fc", "mlp_proj")  # in the order of blocks.c


class PreparedAdapter:
    """An adapter in the layout of the engine. It is complete when its constructor returns, and never changes.

    Its numbers are bfloat16 if the model's are, else float32.
    """

    def __init__(self, adapter: Adapter, config: Architecture, dtype: torch.dtype) -> None:
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.rank, self.digest = adapter.rank, adapter.digest
        fc = config.inner_size * (2 if config.gated else 1)
        # The number of outputs of each linear layer of a block.
        self.widths = {"qkv": config.qkv_size, "attn_proj": config.n_embd, "fc": fc, "mlp_proj": config.n_embd}
        self.keep: list[object] = []
        self.nbytes = 0
        self.most_rank = 0
        self.table: ctypes.Array[ctypes.Structure] | None = None
        self.plain: dict[tuple[int, str], list[tuple[int, LinearLayer, LinearLayer]]] = {}
        places: dict[tuple[int, str], list[LowRank]] = defaultdict(list)
        for product in adapter.products:
            places[product.layer, product.part].append(product)
        if runs():
            table = (declarations().structs["LowRank"] * (config.n_layer * len(PARTS)))()
            for (layer, part), products in places.items():
                table[layer * len(PARTS) + PARTS.index(part)] = self._packed(products)
            self.table = table
            return
        for place, products in places.items():
            self.plain[place] = [(p.start, make_linear(p.a, None), make_linear(p.b, None)) for p in products]
            self.nbytes += sum(p.a.nbytes + p.b.nbytes for p in products)

    def _packed(self, products: list[LowRank]) -> Any:
        """Return a LowRank of kernels.h: all A below each other, and a B for each."""
        declared = declarations()
        ups, downs, first = [], [], 0
        for product in products:
            rank, width = product.a.shape
            more, columns = -rank % declared.constants["LOW_RANK_STEP"], -width % declared.constants["LOW_RANK_INPUTS"]
            downs.append(F.pad(product.a, (0, columns, 0, more)))  # with zeros
            ups.append(declared.structs["Up"](self._panels(product.b), product.start, len(product.b), first, rank))
            first += rank + more
        self.most_rank = max(self.most_rank, first)
        array = (declared.structs["Up"] * len(ups))(*ups)
        self.keep.append(array)
        return declared.structs["LowRank"](self._kept(torch.cat(downs)), ctypes.addressof(array), first, len(ups))

    def _panels(self, b: Tensor) -> int:
        """Return the address of b (out, r) as [out / 64][r][64]."""
        panel = declarations().constants["LOW_RANK_PANEL"]
        out, rank = b.shape
        filled = F.pad(b, (0, 0, 0, -out % panel))
        return self._kept(filled.view(-1, panel, rank).transpose(1, 2))

    def _kept(self, tensor: Tensor) -> int:
        values = tensor.to(self.dtype).contiguous()
        self.keep.append(values)
        self.nbytes += values.nbytes
        return values.data_ptr()


class AdapterRows:
    """The rows of one step, or of several with the same layout, that have adapters."""

    def __init__(self, groups: list[tuple[PreparedAdapter, list[int]]], m: int) -> None:
        """groups: each adapter of the step with its rows, of `m` rows in all."""
        self.adapters = [adapter for adapter, _ in groups]
        order = [row for _, rows in groups for row in rows]
        self.begin = [0, *itertools.accumulate(len(rows) for _, rows in groups)]
        self.rows = torch.tensor(order, dtype=torch.int64)
        self.of_row = torch.full((m,), -1, dtype=torch.int32)
        self.of_row[self.rows] = torch.arange(len(order), dtype=torch.int32)
        self.widths = self.adapters[0].widths
        self.dtype = self.adapters[0].dtype
        self.sums = torch.empty(len(order), max(self.widths.values()))
        self._struct: Any = None
        self._keep: list[object] = []

    @classmethod
    def of(cls, members: Iterable[tuple[PreparedAdapter | None, int]], m: int) -> AdapterRows | None:
        """Return the adapters of sequences that have so many rows each, one after the other; None if none has one."""
        groups: dict[PreparedAdapter, list[int]] = {}
        row = 0
        for adapter, count in members:
            if adapter is not None:
                groups.setdefault(adapter, []).extend(range(row, row + count))
            row += count
        return cls([*groups.items()], m) if groups else None

    def struct(self) -> Any:
        """Return the Adapters of kernels.h."""
        if self._struct is None:
            begin, rows = torch.tensor(self.begin, dtype=torch.int64), self.rows.int()
            tables = (ctypes.c_void_p * len(self.adapters))(*(ctypes.addressof(_table(a)) for a in self.adapters))
            rank = max(adapter.most_rank for adapter in self.adapters)
            middle = torch.empty(len(rows), rank)
            self._keep += [begin, rows, tables, middle]
            self._struct = declarations().structs["Adapters"](
                rows.data_ptr(), self.of_row.data_ptr(), begin.data_ptr(), ctypes.addressof(tables), middle.data_ptr(),
                self.sums.data_ptr(), len(rows), len(self.adapters), rank,
            )  # fmt: skip
        return self._struct

    def entry(self) -> int | None:
        """Return the address of low_rank() in kernels.h."""
        return ctypes.cast(load(SOURCE).low_rank, ctypes.c_void_p).value

    def extra(self, layer: int, part: str, x: Tensor) -> Extra | None:
        """Return what the adapters make of x (m, in) in a linear layer; None if none changes it."""
        n = self.widths[part]
        if self.adapters[0].table is None:
            return self._plain(layer, part, x, n)
        x = x.to(self.dtype).contiguous()
        place, wide = layer * len(PARTS) + PARTS.index(part), self.dtype == torch.float32
        found = load(SOURCE).low_rank(ctypes.byref(self.struct()), place, x.data_ptr(), x.shape[1], n, wide)
        sums = self.sums.view(-1)[: len(self.rows) * n].view(-1, n)
        return Extra(sums, self.rows, self.of_row) if found else None

    def _plain(self, layer: int, part: str, x: Tensor, n: int) -> Extra | None:
        sums = None
        for i, adapter in enumerate(self.adapters):
            begin, end = self.begin[i], self.begin[i + 1]
            for start, down, up in adapter.plain.get((layer, part), ()):
                if sums is None:
                    sums = torch.zeros(len(self.rows), n)
                more = up(down(x[self.rows[begin:end]].float()))  # (rows, in) -> (rows, r) -> (rows, out)
                sums[begin:end, start : start + more.shape[1]] += more
        return None if sums is None else Extra(sums, self.rows, self.of_row)


def _table(adapter: PreparedAdapter) -> Any:
    assert adapter.table is not None, "adapters of one process are prepared in one way"
    return adapter.table


def runs() -> bool:
    """Return whether adapters.c serves; EB_KERNELS=off in the environment selects plain PyTorch."""
    return load_unless_off(SOURCE, "the C kernel for adapters", "PyTorch, which is slower") is not None

"""A step between token ids and the head: as calls of the layers one by one, or all of them in one call of C.

At one row a block takes half a millisecond, of which going in and out of Python took a tenth. The C way serves where
all its parts do: bfloat16 on a CPU, our kernels for linear layers and attention, GPT-2's activation.

It must not know pages' owners, requests or sampling.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generate.cpu.attention import Attention, CAttention, PackedRows
from generate.cpu.kernels import KernelError, load_library
from generate.cpu.linear import GELU_TANH, KernelLinear, make_linear
from generate.cpu.team import team
from models.gpt2 import GPTConfig

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("blocks.c")


class Blocks(Protocol):
    """ids and places (rows) to the normed states (due, C) of the rows `due`, of all where that is None.

    All rows' keys and values are written on the way.
    """

    def __call__(self, ids: Tensor, places: Tensor, rows: PackedRows, due: Tensor | None) -> Tensor: ...


class Block:
    """One transformer block with its weights where they are fastest."""

    def __init__(self, block: nn.Module, scale: float, activation: str) -> None:
        self.ln_1, self.ln_2 = block.ln_1, block.ln_2
        self.scale = scale
        self.c_attn = make_linear(block.attn.c_attn.weight, block.attn.c_attn.bias)
        self.attn_proj = make_linear(block.attn.c_proj.weight, block.attn.c_proj.bias)
        self.c_fc = make_linear(block.mlp.c_fc.weight, block.mlp.c_fc.bias, activation)
        self.mlp_proj = make_linear(block.mlp.c_proj.weight, block.mlp.c_proj.bias)

    @property
    def linears(self) -> tuple[object, ...]:
        return self.c_attn, self.attn_proj, self.c_fc, self.mlp_proj

    def __call__(self, x: Tensor, attend: Attention, keys: Tensor, values: Tensor, rows: PackedRows) -> Tensor:
        qkv = self.c_attn(self.ln_1(x))
        x = self.attn_proj.add(attend(qkv, keys, values, rows, self.scale), x)
        return self.mlp_proj.add(self.c_fc(self.ln_2(x)), x)


class LayeredBlocks:
    """Block after block, any device and format."""

    def __init__(
        self, body: nn.ModuleDict, blocks: Sequence[Block], attend: Attention, keys: Tensor, values: Tensor
    ) -> None:
        self.wte, self.wpe, self.ln_f = body.wte.weight, body.wpe.weight, body.ln_f
        self.blocks, self.attend = blocks, attend
        self.keys, self.values = keys, values

    def __call__(self, ids: Tensor, places: Tensor, rows: PackedRows, due: Tensor | None) -> Tensor:
        x = F.embedding(ids, self.wte) + F.embedding(places, self.wpe)
        for block, keys, values in zip(self.blocks, self.keys, self.values):
            x = block(x, self.attend, keys, values, rows)
        return self.ln_f(x if due is None else x[due])


class _Linear(ctypes.Structure):
    _fields_ = [("packed", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _Block(ctypes.Structure):
    _fields_ = [
        ("ln_1", ctypes.c_void_p), ("ln_2", ctypes.c_void_p),
        ("c_attn", _Linear), ("attn_proj", _Linear), ("c_fc", _Linear), ("mlp_proj", _Linear),
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        ("linear", ctypes.c_void_p), ("attention", ctypes.c_void_p),
        ("wte", ctypes.c_void_p), ("wpe", ctypes.c_void_p), ("ln_f", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("width", ctypes.c_int64), ("inner", ctypes.c_int64),
        ("heads", ctypes.c_int), ("head_size", ctypes.c_int),
        ("page_size", ctypes.c_int), ("pages", ctypes.c_int),
    ]  # fmt: skip


class CBlocks:
    """blocks.c over weights and pages that this object keeps alive. Raises KernelError where it cannot be made."""

    def __init__(
        self,
        body: nn.ModuleDict,
        blocks: Sequence[Block],
        attend: CAttention,
        keys: Tensor,
        values: Tensor,
        config: GPTConfig,
    ) -> None:
        self.run = _library().run_blocks
        self.attend = attend
        self.width, self.inner = config.n_embd, config.inner_size
        tables = [body.wte.weight.contiguous(), body.wpe.weight.contiguous()]
        self.keep = [blocks, attend, keys, values, tables]
        self.model = self._model(blocks[0], tables, self._norm(body.ln_f), keys, config)
        self.table = (_Block * len(blocks))(*(self._entry(b, k, v, config) for b, k, v in zip(blocks, keys, values)))

    def _model(self, block: Block, tables: list[Tensor], ln_f: int, keys: Tensor, config: GPTConfig) -> _Model:
        assert isinstance(block.c_attn, KernelLinear)
        _, pages, heads, page_size, head_size = keys.shape
        linear = ctypes.cast(block.c_attn.library.packed_linear, ctypes.c_void_p)
        attention = ctypes.cast(self.attend.entry, ctypes.c_void_p)
        return _Model(
            linear, attention, *(table.data_ptr() for table in tables), ln_f,
            config.layer_norm_epsilon, self.width, self.inner, heads, head_size, page_size, pages,
        )  # fmt: skip

    def _norm(self, norm: nn.LayerNorm) -> int:
        """Return where the weight and the bias of a layer norm lie, as float32."""
        both = torch.cat((norm.weight, norm.bias)).float().contiguous()
        self.keep.append(both)
        return both.data_ptr()

    def _entry(self, block: Block, keys: Tensor, values: Tensor, config: GPTConfig) -> _Block:
        linears = [_Linear(layer.packed.data_ptr(), layer.bias_at) for layer in block.linears]
        return _Block(
            self._norm(block.ln_1), self._norm(block.ln_2), *linears, keys.data_ptr(), values.data_ptr(),
            block.scale, config.layer_norm_epsilon,
        )  # fmt: skip

    def __call__(self, ids: Tensor, places: Tensor, rows: PackedRows, due: Tensor | None) -> Tensor:
        m = len(ids)
        n_due = m if due is None else len(due)
        out = torch.empty((n_due, self.width), dtype=torch.bfloat16)
        work = torch.empty(m * (2 * self.width + max(3 * self.width, self.inner)), dtype=torch.bfloat16)
        wrong = self.run(
            ctypes.byref(self.model), self.table, len(self.table), ids.data_ptr(), places.data_ptr(), m,
            None if due is None else due.data_ptr(), n_due, out.data_ptr(), work.data_ptr(),
            rows.starts.data_ptr(), rows.lengths.data_ptr(), rows.tables.data_ptr(),
            len(rows.lengths), rows.tables.shape[1],
        )  # fmt: skip
        if wrong:
            raise self.attend.error(wrong, rows, m, self.model.page_size, self.model.pages)
        return out


def make_blocks(body: nn.ModuleDict, attend: Attention, keys: Tensor, values: Tensor, config: GPTConfig) -> Blocks:
    """Take the weights out of the blocks of `body` (wte, wpe, h, ln_f) and return the fastest way through it.

    keys, values: (layers, pages, heads, page size, head size). Sets what the kernels compute with.
    """
    threads = torch.get_num_threads()
    team().use(threads, own=True)
    blocks = []
    for i, module in enumerate(body.h):
        blocks.append(Block(module, config.attention_scale(i), config.activation))
        del module.attn, module.mlp  # the packed weights have taken their place
    ours = all(isinstance(layer, KernelLinear) for block in blocks for layer in block.linears)
    if ours and isinstance(attend, CAttention) and blocks[0].c_fc.mode == GELU_TANH:
        try:
            return CBlocks(body, blocks, attend, keys, values, config)
        except (KernelError, OSError) as error:
            log.warning("blocks run layer by layer in Python, which is slightly slower: %s", error)
    team().use(threads, own=False)
    return LayeredBlocks(body, blocks, attend, keys, values)


@functools.cache
def _library() -> ctypes.CDLL:
    library = team().join(load_library(SOURCE))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.run_blocks.argtypes = [pointer, pointer, integer, pointer, pointer, ctypes.c_int64,
                                   pointer, ctypes.c_int64, pointer, pointer,
                                   pointer, pointer, pointer, integer, integer]  # fmt: skip
    return library

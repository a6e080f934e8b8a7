"""A step between token ids and the head: layer by layer from Python, or all layers in one call of C.

At one row a block takes half a millisecond, a tenth of which would go into calls from Python. The C implementation
serves where all its parts do: bfloat16 on a CPU, our kernels for linear layers and attention, GPT-2's activation.

It must not know requests, sampling, or who owns a page.
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
from generate.cpu.declarations import declarations
from generate.cpu.kernels import KernelError, load_library
from generate.cpu.linear import GELU_TANH_NAMES, KernelLinear, make_linear
from generate.cpu.team import team
from models import gpt2
from models.architecture import LanguageModel

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("blocks.c")


class Blocks(Protocol):
    """Everything below the head of a model, over its KV pages."""

    def __call__(self, ids: Tensor, positions: Tensor, rows: PackedRows, sample_rows: Tensor | None) -> Tensor:
        """Write the keys and values of all rows; return the normed states of `sample_rows`, of all rows for None.

        ids, positions: int64 [M]. sample_rows: int64 [R]. Returns [R, C].
        """
        ...


class Block:
    """One transformer block of GPT-2 with its weights in the fastest layout."""

    def __init__(self, block: gpt2.Block, scale: float, activation: str) -> None:
        self.ln_1, self.ln_2 = block.ln_1, block.ln_2
        self.scale = scale
        self.c_attn = make_linear(block.attn.c_attn.weight, block.attn.c_attn.bias)
        self.attn_proj = make_linear(block.attn.c_proj.weight, block.attn.c_proj.bias)
        self.c_fc = make_linear(block.mlp.c_fc.weight, block.mlp.c_fc.bias, activation)
        self.mlp_proj = make_linear(block.mlp.c_proj.weight, block.mlp.c_proj.bias)

    @property
    def kernels(self) -> list[KernelLinear]:
        """The linear layers in the order of blocks.c, without those that C does not compute."""
        layers = (self.c_attn, self.attn_proj, self.c_fc, self.mlp_proj)
        return [layer for layer in layers if isinstance(layer, KernelLinear)]

    def __call__(self, x: Tensor, attend: Attention, keys: Tensor, values: Tensor, rows: PackedRows) -> Tensor:
        qkv = self.c_attn(self.ln_1(x))  # (M, C) -> (M, 3C)
        x = self.attn_proj.add(attend(qkv, keys, values, rows, self.scale), x)  # (M, C)
        return self.mlp_proj.add(self.c_fc(self.ln_2(x)), x)  # (M, C) -> (M, inner) -> (M, C)


class LayeredBlocks:
    """GPT-2 block after block, on any device and in any format."""

    def __init__(
        self, body: gpt2.Transformer, blocks: Sequence[Block], attend: Attention, keys: Tensor, values: Tensor
    ) -> None:
        self.wte, self.wpe, self.ln_f = body.wte.weight, body.wpe.weight, body.ln_f
        self.blocks, self.attend = blocks, attend
        self.keys, self.values = keys, values

    def __call__(self, ids: Tensor, positions: Tensor, rows: PackedRows, sample_rows: Tensor | None) -> Tensor:
        x: Tensor = F.embedding(ids, self.wte) + F.embedding(positions, self.wpe)  # (M, C)
        for block, keys, values in zip(self.blocks, self.keys, self.values):
            x = block(x, self.attend, keys, values, rows)
        normed: Tensor = self.ln_f(x if sample_rows is None else x[sample_rows])  # (R, C)
        return normed


class CBlocks:
    """blocks.c over weights and pages that this object keeps alive. Raises KernelError where blocks.c cannot be compiled."""

    def __init__(
        self, model: gpt2.GPT, blocks: Sequence[Block], attend: CAttention, keys: Tensor, values: Tensor
    ) -> None:
        body, config = model.transformer, model.config
        self.run = _library().run_blocks
        self.attend = attend
        self.width, self.inner = config.n_embd, config.inner_size
        _, self.pages, heads, self.page_size, head_size = keys.shape
        wte, wpe = body.wte.weight.contiguous(), body.wpe.weight.contiguous()
        self.keep: list[object] = [blocks, attend, keys, values, wte, wpe]
        structs = declarations().structs
        self.model = structs["Model"](
            linear=ctypes.cast(blocks[0].kernels[0].library.packed_linear, ctypes.c_void_p),
            attention=ctypes.cast(attend.entry, ctypes.c_void_p),
            wte=wte.data_ptr(), wpe=wpe.data_ptr(), ln_f=self._norm(body.ln_f), eps=config.layer_norm_epsilon,
            width=self.width, inner=self.inner,
            heads=heads, head_size=head_size, page_size=self.page_size, pages=self.pages,
        )  # fmt: skip
        entries = [
            structs["Block"](
                self._norm(block.ln_1), self._norm(block.ln_2),
                *(structs["Linear"](layer.packed.data_ptr(), layer.bias_ptr) for layer in block.kernels),
                keys=k.data_ptr(), values=v.data_ptr(), scale=block.scale, eps=config.layer_norm_epsilon,
            )
            for block, k, v in zip(blocks, keys, values)
        ]  # fmt: skip
        self.table = (structs["Block"] * len(entries))(*entries)

    def _norm(self, norm: nn.LayerNorm) -> int:
        """Return the address of the weight and the bias of a layer norm, as float32."""
        both = torch.cat((norm.weight, norm.bias)).float().contiguous()
        self.keep.append(both)
        return both.data_ptr()

    def __call__(self, ids: Tensor, positions: Tensor, rows: PackedRows, sample_rows: Tensor | None) -> Tensor:
        M = len(ids)
        R = M if sample_rows is None else len(sample_rows)
        out = torch.empty((R, self.width), dtype=torch.bfloat16)
        work = torch.empty(M * (2 * self.width + max(3 * self.width, self.inner)), dtype=torch.bfloat16)
        code = self.run(
            ctypes.byref(self.model), self.table, len(self.table), ids.data_ptr(), positions.data_ptr(), M,
            None if sample_rows is None else sample_rows.data_ptr(), R, out.data_ptr(), work.data_ptr(),
            rows.cu_seqlens.data_ptr(), rows.context_lens.data_ptr(), rows.block_tables.data_ptr(),
            len(rows.context_lens), rows.block_tables.shape[1],
        )  # fmt: skip
        if code:
            raise self.attend.error(code, rows, M, self.page_size, self.pages)
        return out


def make_blocks(model: LanguageModel, attend: Attention, keys: Tensor, values: Tensor) -> Blocks:
    """Take the weights out of the blocks of `model` and return its fastest implementation here.

    keys, values: (layers, pages, heads, page size, head size). Sets the threads of the kernels. Raises ValueError for
    an architecture that this engine cannot compute.
    """
    if not isinstance(model, gpt2.GPT):
        raise ValueError(f"the engine cannot compute {type(model).__name__}. Use a GPT-2 model")
    body, config = model.transformer, model.config
    threads = torch.get_num_threads()
    team().use(threads, own=True)
    blocks = []
    for i, module in enumerate(body.blocks):
        blocks.append(Block(module, config.attention_scale(i), config.activation))
        del module.attn, module.mlp  # the packed weights have taken their place
    in_c = all(len(block.kernels) == 4 for block in blocks) and config.activation in GELU_TANH_NAMES
    if in_c and isinstance(attend, CAttention):
        try:
            return CBlocks(model, blocks, attend, keys, values)
        except (KernelError, OSError) as error:
            log.warning("blocks run layer by layer in Python, which is slightly slower: %s", error)
    team().use(threads, own=False)
    return LayeredBlocks(body, blocks, attend, keys, values)


@functools.cache
def _library() -> ctypes.CDLL:
    return team().join(load_library(SOURCE))

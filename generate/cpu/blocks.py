"""A step between token ids and the head: layer by layer from Python, or all layers in one call of C.

At one row a block takes half a millisecond, a tenth of which would go into calls from Python. The C implementation
serves where all its parts do: bfloat16 on a CPU, our kernels for linear layers and attention, an activation that it knows.

It must not know requests, sampling, or who owns a page.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from generate.cpu.adapters import AdapterRows
from generate.cpu.attention import Attention, CAttention, PackedRows
from generate.cpu.declarations import declarations
from generate.cpu.kernels import KernelError
from generate.cpu.layers import Block, LayeredBlocks
from generate.cpu.linear import GELU_MODES, SILU_NAMES
from generate.cpu.team import load, team
from generate.rotary import rotation_table
from models.architecture import Architecture
from models.network import Network, Norm

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("blocks.c")


class CBlocks:
    """blocks.c over weights and pages that this object keeps alive. Raises KernelError where blocks.c cannot be compiled."""

    def __init__(
        self, model: Network, blocks: Sequence[Block], attend: CAttention, keys: Tensor, values: Tensor
    ) -> None:
        config = model.config
        self.run = load(SOURCE).run_blocks
        self.blocks, self.attend = blocks, attend
        self.width = config.n_embd
        attended = config.n_head * config.head_size
        # The rows of a step: the residual, what a norm or attention gives, and queries, keys and values or the MLP.
        self.row_size = self.width + max(self.width, attended) + max(config.qkv_size, config.inner_size, self.width)
        self.row_size += self.width * config.parallel
        _, self.pages, _, self.page_size, _ = keys.shape
        self.keep: list[object] = [keys, values]
        structs = declarations().structs
        rotation = rotation_table(config.rope, config.head_size, config.block_size) if config.rope else None
        self.model = structs["Model"](
            linear=ctypes.cast(blocks[0].kernels[0].library.packed_linear, ctypes.c_void_p),
            attention=ctypes.cast(attend.entry, ctypes.c_void_p),
            embedding=self._address(model.embedding), positions=self._address(model.positions),
            embedding_norm=model.embedding_norm and self._norm(model.embedding_norm, config),
            rotation=self._address(rotation), norm=self._norm(model.norm, config), eps=config.norm_epsilon,
            rms=config.norm == "rms", norm_after=config.norm_after, parallel=config.parallel,
            whole_qk_norm=config.whole_qk_norm,
            mlp_mode=blocks[0].kernels[2].mode,
            heads=config.n_head, kv_heads=config.n_kv_head, head_size=config.head_size,
            page_size=self.page_size, pages=self.pages, width=self.width,
        )  # fmt: skip
        entries = [
            structs["Block"](
                self._norm(block.norm_1, config), self._norm(block.norm_2, config),
                *(self._address(weight.float()) if weight is not None else None for weight in block.head_norms),
                *(layer.struct for layer in block.kernels),
                keys=k.data_ptr(), values=v.data_ptr(), scale=block.scale, turns=block.turn is not None,
                window=block.reach.window, alibi=block.reach.alibi,
            )
            for block, k, v in zip(blocks, keys, values)
        ]  # fmt: skip
        self.table = (structs["Block"] * len(entries))(*entries)

    def _adapters(self, rows: AdapterRows) -> object:
        """Return a reference to the struct of the rows' adapters."""
        struct, self.model.low_rank = rows.struct(), rows.entry()
        return ctypes.byref(struct)

    def _address(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor's values, which live as long as this object; None for none."""
        if tensor is None:
            return None
        values = tensor.contiguous()
        self.keep.append(values)
        return values.data_ptr()

    def _norm(self, norm: Norm, config: Architecture) -> int | None:
        """Return the address of a norm's weight as float32, followed by the bias if it is a layer norm."""
        parts = [norm.weight]
        if config.norm == "layer":
            parts.append(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)
        return self._address(torch.cat(parts).float())

    def __call__(self, ids: Tensor, positions: Tensor, rows: PackedRows, sample_rows: Tensor | None) -> Tensor:
        """See `LayeredBlocks.__call__`."""
        M = len(ids)
        R = M if sample_rows is None else len(sample_rows)
        out = torch.empty((R, self.width), dtype=torch.bfloat16)
        work = torch.empty(M * self.row_size, dtype=torch.bfloat16)
        code = self.run(
            ctypes.byref(self.model), self.table, len(self.table), ids.data_ptr(), positions.data_ptr(), M,
            None if sample_rows is None else sample_rows.data_ptr(), R, out.data_ptr(), work.data_ptr(),
            rows.cu_seqlens.data_ptr(), rows.context_lens.data_ptr(), rows.block_tables.data_ptr(),
            len(rows.context_lens), rows.block_tables.shape[1],
            None if rows.adapters is None else self._adapters(rows.adapters),
        )  # fmt: skip
        if code:
            raise self.attend.error(code, rows, M, self.page_size, self.pages)
        return out


def make_blocks(
    model: Network, attend: Attention, keys: Tensor, values: Tensor, quantize: str = "none"
) -> CBlocks | LayeredBlocks:
    """Take the blocks out of `model` and return its fastest implementation here.

    keys, values: (layers, pages, KV heads, page size, head size). Sets the threads of the kernels.
    """
    config = model.config
    threads = torch.get_num_threads()
    team().use(threads, own=True)
    # One by one: the packed weights take the place of each block's own.
    blocks = [Block(block, config, layer, quantize) for layer, block in enumerate(model.take_blocks())]
    if isinstance(attend, CAttention) and _runs_in_c(config) and all(len(block.kernels) == 4 for block in blocks):
        try:
            return CBlocks(model, blocks, attend, keys, values)
        except (KernelError, OSError) as error:
            log.warning("blocks run layer by layer in Python, which is slightly slower: %s", error)
    team().use(threads, own=False)
    return LayeredBlocks(model, blocks, attend, keys, values)


def _runs_in_c(config: Architecture) -> bool:
    """Return whether blocks.c computes this architecture."""
    if config.experts:
        return False
    even = config.rope is None or config.head_size % 2 == 0
    if config.both_norms or config.local_rope or config.attention_cap or config.embedding_scale != 1:
        return False
    return even and config.activation in (SILU_NAMES if config.gated else GELU_MODES)

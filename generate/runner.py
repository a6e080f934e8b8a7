"""The model at work: one plan in, one token for each sequence whose prompt is complete out.

All tokens of a step, decodes and pieces of prompts alike, lie in one row and go through every linear layer together;
only attention looks at each sequence's own pages. The numbers of a token depend on its own sequence alone, never on
its neighbors. It must not know HTTP, queues or policies, nor the layers of an architecture.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from generate import memory
from generate.constraint import filling
from generate.cpu.adapters import AdapterRows
from generate.cpu.attention import PackedRows, make_attention
from generate.cpu.blocks import make_blocks
from generate.cpu.linear import make_head
from generate.packing import Packed, add_embeddings, pack, sample_outputs
from generate.quantize import AS_STORED, NONE, check, check_finite, kinds_of
from generate.sampling import Draws, History
from models.gpt2 import GPT
from models.network import Network
from scheduling.iteration import Experts, Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence


class Runner:
    """Computes plans for one model over one pool of KV pages.

    keys and values: (layers, pages, KV heads, page size, head size) of `dtype`, or 8-bit pools with scales in their rows.
    """

    attention: str  # the name of its implementation

    def __init__(self, network: Network, n_pages: int, page_size: int, kv_dtype: torch.dtype | None = None) -> None:
        self.config = network.config
        self.page_size = page_size
        self.device, self.dtype = network.head.device, network.head.dtype
        self.keys, self.values = memory.kv_pools(self.config, n_pages, page_size, kv_dtype or self.dtype, self.device)

    def forward(self, plan: Plan) -> list[Output]:
        """Compute one step; return the next token of each sequence of the plan, None while its prompt lasts."""
        raise NotImplementedError

    def release_memory(self) -> None:
        """Free cached memory, so that a step that ran out of memory can be tried again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _Decoded(NamedTuple):
    """The layout of a step in which every sequence decoded, for the next step if it has the same sequences."""

    number: int
    sequences: list[Sequence]
    page_counts: list[int]  # of the sequences, as the block tables have them
    rows: PackedRows
    draws: Draws

    @classmethod
    def of(cls, plan: Plan, rows: PackedRows) -> _Decoded | None:
        """Return the layout of a step that sampled every row; None where log probabilities are requested."""
        params = [seq.sampling for seq in plan.sequences]
        if False in [p.is_drawn for p in params]:
            return None
        counts = [len(seq.pages) for seq in plan.sequences]
        return cls(plan.number, plan.sequences, counts, rows, Draws(params, rows.context_lens.device))

    def followed_by(self, plan: Plan) -> _Decoded | None:
        """Return the layout of a step in which the same sequences each compute one new token, with the pages that they got
        since; None for another step."""
        # After a failed step that was retried in halves, this is the second half, while the plan repeats the whole.
        if not plan.repeats or plan.number != self.number + 1 or plan.held or plan.sequences != self.sequences:
            return None
        counts = [len(seq.pages) for seq in self.sequences]
        if counts == self.page_counts:
            return self
        tables = self.rows.block_tables  # (n, width); this layout's own, so that rows may be changed in place
        wider = max(counts) - tables.shape[1]
        if wider > 0:
            tables = torch.nn.functional.pad(tables, (0, wider))
        for i, (count, before) in enumerate(zip(counts, self.page_counts)):
            if count != before:
                tables[i, before:count] = torch.tensor(self.sequences[i].pages[before:], dtype=torch.int32)
        return self._replace(page_counts=counts, rows=replace(self.rows, block_tables=tables))


class ModelRunner(Runner):
    """The runner for CPUs, and in plain PyTorch for any device."""

    def __init__(
        self,
        model: Network | GPT,
        n_pages: int,
        page_size: int,
        kv_dtype: torch.dtype | None = None,
        quantize: str = NONE,
    ) -> None:
        network = model.network()
        check(quantize, network.head.dtype, network.head.device)
        super().__init__(network, n_pages, page_size, kv_dtype)
        self.quantize, self.kinds = quantize, kinds_of(network)
        quantize = NONE if quantize == AS_STORED else quantize  # what stays in blocks is in blocks already
        check_finite(quantize, "the head", network.head)
        self.attend = make_attention(self.dtype, self.device, self.keys.dtype)
        self.attention = self.attend.name
        self.head = make_head(network.head, quantize, network.head_bias)
        self.blocks = make_blocks(network, self.attend, self.keys, self.values, quantize)
        self._mixtures = [block.experts for block in self.blocks.blocks if block.experts]
        self._last: _Decoded | None = None

    @torch.inference_mode()
    def forward(self, plan: Plan) -> list[Output]:
        """See `Runner.forward`."""
        if self._last is not None and (last := self._last.followed_by(plan)) is not None:
            return self._decode_again(plan, last)
        held = [seq for seq in plan.held if seq.pages] if plan.padded else []
        packed, rows = self._pack(plan, held)
        # Whose members all decode: sample every row, and keep the layout for the next step.
        is_plain = len(packed.sample_rows) == len(packed.ids) and not held and not plan.drafts
        decodes = is_plain and [] not in [seq.output_ids for seq in plan.sequences]
        if decodes and (last := _Decoded.of(plan, rows)) is not None:
            return self._decode_again(plan, last)
        ids = torch.tensor(packed.ids, device=self.device)
        positions = torch.tensor(packed.positions, device=self.device)
        logits, states = self.compute(ids, positions, rows, packed.sample_rows, packed.pool_rows)
        outputs = sample_outputs(plan.sequences, plan.counts, logits, plan.drafts)
        self._note(plan)
        add_embeddings(outputs, plan.sequences, plan.counts, states)
        self._last = None
        return outputs

    def _decode_again(self, plan: Plan, last: _Decoded) -> list[Output]:
        """Compute the next tokens of sequences that all decode, in a layout of these, such as that of the last step.

        The layout may be reused because nothing in it depends on the step but the positions: each sequence has one
        row again, its parameters never change, and the block tables have the pages that it got since.
        """
        sequences = plan.sequences
        ids = torch.tensor([seq.output_ids[-1] for seq in sequences], device=self.device)  # (M)
        positions = torch.tensor([seq.computed for seq in sequences], device=self.device)  # (M)
        next_positions = positions + 1
        last.rows.context_lens.copy_(next_positions)
        logits, _ = self.compute(ids, positions, last.rows, range(len(sequences)))  # (M, V)

        def history(i: int) -> History:
            return History(sequences[i].prompt_ids, sequences[i].output_ids)

        outputs: list[Output] = [*last.draws.draw(logits, next_positions, history)]
        self._note(plan)
        # A step that failed is computed again in the layout before it, with the same new pages.
        self._last = last._replace(number=plan.number)
        return outputs

    def _note(self, plan: Plan) -> None:
        """Put into the plan what only the model knows about its step."""
        if filling.seconds:
            plan.mask_seconds += filling.take()
        if mixtures := self._mixtures:
            plan.experts = Experts(sum(m.read for m in mixtures), len(mixtures) * self.config.experts)

    def compute(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: PackedRows,
        sample_rows: abc.Sequence[int],
        pool_rows: abc.Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return float32 logits (R, V) of the R rows to sample and final states (P, C) of the P rows to pool.

        All M rows' keys and values are written. ids, positions: int64 (M).
        """
        some, R = None, len(sample_rows)
        if len(ids) > R:
            some = torch.tensor([*sample_rows, *pool_rows], dtype=torch.long, device=self.device)
        x = self.blocks(ids, positions, rows, some)  # (R + P, C)
        logits, cap = self.head(x[:R]) if R else x[:0], self.config.logits_cap
        return cap * (logits / cap).tanh() if cap else logits, x[R:]

    def _pack(self, plan: Plan, held: abc.Sequence[Sequence]) -> tuple[Packed, PackedRows]:
        """Return the tokens and rows of the plan, its held sequences and its padding.

        A held sequence computes and samples its last token again, the dead weight of a padded batch; its rows come
        behind the plan's, and their logits are dropped.
        """
        packed = pack(plan.sequences, plan.counts, plan.drafts)
        ids, positions, sample_rows, _ = packed
        context_lens = [seq.computed + count for seq, count in zip(plan.sequences, plan.counts)]
        for seq in held:
            sample_rows.append(len(ids))
            ids += seq.tokens(seq.computed - 1, 1)
            positions.append(seq.computed - 1)
            context_lens.append(seq.computed)
        counts = (0, *plan.counts, *itertools.repeat(1, len(held)))
        ids += [0] * plan.padding
        positions += [0] * plan.padding
        members = (*plan.sequences, *held)
        pages = [seq.pages for seq in members]
        width = max(map(len, pages))
        int32 = partial(torch.tensor, dtype=torch.int32, device=self.device)
        adapters = [seq.adapter_weights for seq in members]
        rows = PackedRows(
            cu_seqlens=int32([*itertools.accumulate(counts)]),  # (n + 1)
            context_lens=int32(context_lens),  # (n)
            block_tables=int32([p + [0] * (width - len(p)) for p in pages]),  # (n, width)
            adapters=AdapterRows.of(zip(adapters, counts[1:]), len(ids)) if any(adapters) else None,
        )
        return packed, rows

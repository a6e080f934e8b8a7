"""The model at work: one plan in, one token for each sequence due out.

All tokens of a step, decodes and pieces of prompts alike, lie in one row and go through every linear layer together;
attention alone looks at each sequence's own pages. The numbers of a token depend on its own sequence only, never on
its neighbours. It must not know HTTP, queues or policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows

import torch
from torch import Tensor
from torch.nn import functional as F

from generate.attention import Attention, PackedRows, make_attention
from generate.linear import make_head, make_linear
from generate.sampling import sample
from model import GPT
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence


class Layer:
    """One transformer block with its weights where they are fastest."""

    def __init__(self, block: torch.nn.Module, scale: float, activation: str) -> None:
        self.ln_1, self.ln_2 = block.ln_1, block.ln_2
        self.scale = scale
        self.c_attn = make_linear(block.attn.c_attn.weight, block.attn.c_attn.bias)
        self.attn_proj = make_linear(block.attn.c_proj.weight, block.attn.c_proj.bias)
        self.c_fc = make_linear(block.mlp.c_fc.weight, block.mlp.c_fc.bias, activation)
        self.mlp_proj = make_linear(block.mlp.c_proj.weight, block.mlp.c_proj.bias)

    def __call__(
        self, x: Tensor, attend: Attention, keys: Tensor, values: Tensor, rows: PackedRows
    ) -> Tensor:
        qkv = self.c_attn(self.ln_1(x))
        x = self.attn_proj.add(attend(qkv, keys, values, rows, self.scale), x)
        return self.mlp_proj.add(self.c_fc(self.ln_2(x)), x)


class ModelRunner:
    """Computes plans for one model over one pool of KV pages.

    keys and values: (layers, pages, heads, page size, head size) of the model's dtype.
    """

    def __init__(self, model: GPT, n_pages: int, page_size: int) -> None:
        self.config = model.config
        self.page_size = page_size
        body, weight = model.transformer, model.lm_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.wte, self.wpe, self.ln_f = body.wte.weight, body.wpe.weight, body.ln_f
        self.attend = make_attention(self.dtype, self.device)
        self.layers = []
        for i, block in enumerate(body.h):
            scale = self.config.attention_scale(i)
            self.layers.append(Layer(block, scale, self.config.activation))
            del block.attn, block.mlp  # the packed weights have taken their place
        self.head = make_head(weight)
        c = self.config
        shape = (c.n_layer, n_pages, c.n_head, page_size, c.head_size)
        self.keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.values = torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> list[Output]:
        """Compute one step; return for each sequence of the plan its next token, None while its prompt lasts."""
        held = [seq for seq in plan.held if seq.pages] if plan.padded else []
        ids, places, rows, due = self._pack(plan, held)
        logits = self.logits(ids, places, rows, due)
        sequences = [s for s, n in zip(plan.sequences, plan.counts) if n == s.pending]
        tokens = iter(
            sample(
                logits[: len(sequences)],
                [s.sampling for s in sequences],
                [s.length for s in sequences],
            )
            if sequences
            else ()
        )
        return [
            next(tokens) if n == s.pending else None for s, n in zip(plan.sequences, plan.counts)
        ]

    def logits(self, ids: Tensor, places: Tensor, rows: PackedRows, due: list[int]) -> Tensor:
        """Return float32 logits of the rows that are `due`, after all rows' keys and values are written."""
        x = F.embedding(ids, self.wte) + F.embedding(places, self.wpe)
        for layer, keys, values in zip(self.layers, self.keys, self.values):
            x = layer(x, self.attend, keys, values, rows)
        if len(due) < len(ids):
            x = x[torch.tensor(due, dtype=torch.long, device=self.device)]
        return self.head(self.ln_f(x)) if due else x

    def _pack(
        self, plan: Plan, held: Rows[Sequence]
    ) -> tuple[Tensor, Tensor, PackedRows, list[int]]:
        """Lay the plan's tokens in one row; held sequences compute their last token once more.

        The rows due are those whose logits give a token, and the held ones, which pay for theirs in vain.
        """
        ids: list[int] = []
        places: list[int] = []
        starts, lengths, due, wasted = [0], [], [], []
        for seq, count in zip(plan.sequences, plan.counts):
            ids += seq.tokens(seq.computed, count)
            places += range(seq.computed, seq.computed + count)
            lengths.append(seq.computed + count)
            starts.append(len(ids))
            if count == seq.pending:
                due.append(len(ids) - 1)
        for seq in held:
            ids += seq.tokens(seq.computed - 1, 1)
            places.append(seq.computed - 1)
            lengths.append(seq.computed)
            starts.append(len(ids))
            wasted.append(len(ids) - 1)
        ids += [0] * plan.padding
        places += [0] * plan.padding
        members = itertools.chain(plan.sequences, held)
        return (
            torch.tensor(ids, device=self.device),
            torch.tensor(places, device=self.device),
            PackedRows(
                starts=torch.tensor(starts, dtype=torch.int32, device=self.device),
                lengths=torch.tensor(lengths, dtype=torch.int32, device=self.device),
                tables=self._tables([seq.pages for seq in members]),
            ),
            due + wasted,
        )

    def _tables(self, pages: list[list[int]]) -> Tensor:
        width = max(len(p) for p in pages)
        padded = [p + [0] * (width - len(p)) for p in pages]
        return torch.tensor(padded, dtype=torch.int32, device=self.device)

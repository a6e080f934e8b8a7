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
from generate.linear import make_linear
from generate.sampling import sample
from model import GPT
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence

REFINED = 64  # logits of a 16-bit head that are computed again in float32


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


class Head:
    """Float32 logits (R, V) of hidden states (R, C).

    GPT-2's logits share a large negative offset, at which 16-bit numbers are coarse. So a 16-bit head computes with
    weights less their mean, which shifts all logits of a row alike, and the largest ones again in float32.
    """

    def __init__(self, weight: Tensor) -> None:
        self.exact = weight.dtype == torch.float32
        self.weight = weight
        if self.exact:
            self.linear = make_linear(weight, None)
            return
        self.mean = weight.float().mean(0)
        self.linear = make_linear((weight.float() - self.mean).to(weight.dtype), None)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.linear(x).float()
        if self.exact:
            return logits
        ids = logits.topk(min(REFINED, logits.shape[1])).indices
        wide = x.float()
        exact = (self.weight[ids].float() * wide[:, None]).sum(-1) - (wide * self.mean).sum(
            -1, True
        )
        return logits.scatter_(1, ids, exact)


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
        self.head = Head(weight)
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
            sample(logits[: len(sequences)], [s.sampling for s in sequences], [s.length for s in sequences])
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
        x = x[torch.tensor(due, device=self.device)] if len(due) < len(ids) else x
        if not len(x):
            return x
        return self.head(self.ln_f(x))[: len(due)]

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
        extra = plan.padding + self._filler(len(ids) + plan.padding)
        ids += [0] * extra
        places += [0] * extra
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

    def _filler(self, rows: int) -> int:
        """Rows to add so that few different row counts occur: each new one costs oneDNN a compilation."""
        if self.device.type != "cpu":
            return 0
        if rows == 1:
            return (
                1 if self.dtype == torch.float32 else 0
            )  # float32 differs in its last bits for one row
        return -rows % (1 if rows <= 8 else 4 if rows <= 64 else 16)

    def _tables(self, pages: list[list[int]]) -> Tensor:
        width = max(len(p) for p in pages)
        padded = [p + [0] * (width - len(p)) for p in pages]
        return torch.tensor(padded, dtype=torch.int32, device=self.device)

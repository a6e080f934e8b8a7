"""The model at work: one plan in, one token for each sequence due out.

All tokens of a step, decodes and pieces of prompts alike, lie in one row and go through every linear layer together;
attention alone looks at each sequence's own pages. The numbers of a token depend on its own sequence only, never on
its neighbours. It must not know HTTP, queues or policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from generate import memory
from generate.cpu.attention import PackedRows, make_attention
from generate.cpu.blocks import make_blocks
from generate.cpu.linear import make_head
from generate.sampling import Draws, History, logprobs, sample
from models.gpt2 import GPT
from scheduling.iteration import Plan
from scheduling.scheduler import Output, Token
from scheduling.sequence import Sequence


def rows_due(seq: Sequence, count: int) -> int:
    """Return how many of the last rows of a piece give logits: one at its end, all when the prompt is scored."""
    if seq.sampling.prompt_logprobs is not None and seq.computed < len(seq.prompt_ids):
        return count
    return int(count == seq.pending)


class _Decoded(NamedTuple):
    """What of a step in which everybody decoded holds for the next one."""

    number: int
    sequences: list[Sequence]
    counts: list[int]
    rows: PackedRows
    drawn: Draws

    @classmethod
    def of(cls, plan: Plan, rows: PackedRows) -> _Decoded | None:
        """Return what is kept of a step whose every row gave a token; None where more than tokens was asked for."""
        params = [seq.sampling for seq in plan.sequences]
        if any(p.logprobs is not None or p.prompt_logprobs is not None for p in params):
            return None
        drawn = Draws(params, rows.lengths.device)
        return cls(plan.number, plan.sequences, plan.counts, rows, drawn)

    def is_followed_by(self, plan: Plan) -> bool:
        """Whether the same sequences each compute their one new token: the scheduler says so by the same lists."""
        return (
            plan.number == self.number + 1
            and plan.sequences is self.sequences
            and plan.counts is self.counts
            and not plan.held
        )


class ModelRunner:
    """Computes plans for one model over one pool of KV pages.

    keys and values: (layers, pages, heads, page size, head size) of the model's dtype.
    """

    def __init__(self, model: GPT, n_pages: int, page_size: int) -> None:
        self.config = model.config
        self.page_size = page_size
        body, weight = model.transformer, model.lm_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.attend = make_attention(self.dtype, self.device)
        self.head = make_head(weight)
        c = self.config
        shape = (c.n_layer, n_pages, c.n_head, page_size, c.head_size)
        self.keys = memory.empty(shape, self.dtype, self.device)
        self.values = memory.empty(shape, self.dtype, self.device)
        self.blocks = make_blocks(body, self.attend, self.keys, self.values, c)
        self._last: _Decoded | None = None

    def release_memory(self) -> None:
        """Give back what former steps were computed in, so that a step that found none can be tried again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> list[Output]:
        """Compute one step; return for each sequence of the plan its next token, None while its prompt lasts."""
        if self._last is not None and self._last.is_followed_by(plan):
            return self._decode_again(plan, self._last)
        held = [seq for seq in plan.held if seq.pages] if plan.padded else []
        ids, places, rows, due = self._pack(plan, held)
        outputs = self._sample(plan, self.logits(ids, places, rows, due))
        self._last = _Decoded.of(plan, rows) if len(due) == len(ids) and not held else None
        return outputs

    def _decode_again(self, plan: Plan, last: _Decoded) -> list[Output]:
        """Compute the next token of who decoded in the last step too: what was laid out then holds but for the places."""
        sequences = plan.sequences
        ids = torch.tensor([seq.output_ids[-1] for seq in sequences], device=self.device)
        places = torch.tensor([seq.computed for seq in sequences], device=self.device)
        next_places = places + 1
        rows = replace(last.rows, lengths=next_places.int())
        logits = self.logits(ids, places, rows, range(len(sequences)))

        def history(i: int) -> History:
            return History(sequences[i].prompt_ids, sequences[i].output_ids)

        outputs: list[Output] = [*last.drawn.draw(logits, next_places, history)]
        self._last = last._replace(number=plan.number)
        return outputs

    def _sample(self, plan: Plan, logits: Tensor) -> list[Output]:
        """Return the plan's outputs from the logits of the rows due, in their order."""
        spans = [rows_due(s, n) for s, n in zip(plan.sequences, plan.counts)]
        last = [end - 1 for end in itertools.accumulate(spans)]
        due = [i for i, s in enumerate(plan.sequences) if plan.counts[i] == s.pending]
        if not any(spans):
            return [None] * len(spans)
        members = [plan.sequences[i] for i in due]
        rows = logits[: last[-1] + 1]
        if len(due) < len(rows):
            rows = logits[[last[i] for i in due]]
        tokens = sample(
            rows,
            [s.sampling for s in members],
            [s.length for s in members],
            [History(s.prompt_ids, s.output_ids) for s in members],
        )
        outputs: list[Output] = [None] * len(spans)
        for i, token in zip(due, tokens):
            outputs[i] = token
        self._add_logprobs(plan, outputs, rows, due)
        for i, seq in enumerate(plan.sequences):
            if seq.sampling.prompt_logprobs is not None and spans[i]:
                first = last[i] - spans[i] + 1
                outputs[i] = self._score_prompt(seq, outputs[i], logits[first : last[i] + 1])
        return outputs

    def _add_logprobs(self, plan: Plan, outputs: list[Output], rows: Tensor, due: list[int]) -> None:
        wanted = [
            (row, i)
            for row, i in enumerate(due)
            if plan.sequences[i].sampling.logprobs is not None and isinstance(outputs[i], int)
        ]
        if wanted:
            found = logprobs(
                rows[[row for row, _ in wanted]],
                [outputs[i] for _, i in wanted],
                [plan.sequences[i].sampling.logprobs for _, i in wanted],
            )
            for (_, i), detail in zip(wanted, found):
                outputs[i] = Token(detail.token, detail)

    def _score_prompt(self, seq: Sequence, output: Output, logits: Tensor) -> Output:
        """Add the log probabilities of the prompt tokens that this piece's rows predict."""
        targets = seq.prompt_ids[seq.computed + 1 : seq.computed + 1 + len(logits)]
        n = seq.sampling.prompt_logprobs or 0
        scores = logprobs(logits[: len(targets)], targets, [n] * len(targets), ranks=True)
        if isinstance(output, BaseException):
            return output
        id, detail = output[:2] if isinstance(output, Token) else (output, None)
        return Token(id, detail, scores)

    def logits(self, ids: Tensor, places: Tensor, rows: PackedRows, due: Rows[int]) -> Tensor:
        """Return float32 logits of the rows that are `due`, after all rows' keys and values are written."""
        some = None
        if len(due) < len(ids):
            some = torch.tensor(due, dtype=torch.long, device=self.device)
        x = self.blocks(ids, places, rows, some)
        return self.head(x) if due else x

    def _pack(self, plan: Plan, held: Rows[Sequence]) -> tuple[Tensor, Tensor, PackedRows, list[int]]:
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
            due += range(len(ids) - rows_due(seq, count), len(ids))
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

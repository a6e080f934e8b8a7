"""A plan's tokens as one packed row, and the row's logits as the plan's outputs; the same on every device.

It must not know pages, attention, queues or policies.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
from array import array
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from generate.sampling import Draws, Failure, History, NotFinite, TokenLogprobs, logprobs
from scheduling.advance import Output, Token, TokenRun, run_of
from scheduling.sequence import Sequence


class Packed(NamedTuple):
    """M tokens in one row: their ids and positions, the rows to sample, whose logits are needed, and the rows to pool."""

    ids: list[int]
    positions: list[int]
    sample_rows: list[int]
    pool_rows: list[int]


def pack(sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], drafts: abc.Sequence[list[int]] = ()) -> Packed:
    """Lay the next `counts[i]` tokens of `sequences[i]`, its drafts the last of them, one after the other."""
    packed = Packed([], [], [], [])
    for i, (seq, count) in enumerate(zip(sequences, counts)):
        packed.ids.extend(seq.tokens(seq.computed, count))
        if drafts:
            packed.ids.extend(drafts[i])
        packed.positions.extend(range(seq.computed, seq.computed + count))
        end = len(packed.ids)
        packed.sample_rows.extend(range(end - sample_count(seq, count), end))
        if seq.sampling.pooling is not None:
            packed.pool_rows.extend(range(end - pool_count(seq, count), end))
    return packed


def sample_count(seq: Sequence, count: int) -> int:
    """Return how many of a piece's last rows are sampled: one at the end of the prompt, all if the prompt is scored.

    Of a decode with drafts these are all rows, too. Of an embedding there are none.
    """
    if not seq.sampling.is_drawn:
        if seq.sampling.pooling is not None:
            return 0
        if _is_scored(seq):
            return count
    return max(0, seq.computed + count - len(seq.prompt_ids) - len(seq.output_ids) + 1)


def pool_count(seq: Sequence, count: int) -> int:
    """Return how many of a piece's last rows an embedding needs: all for a mean, the last of the prompt for "last"."""
    return count if seq.sampling.pooling == "mean" else int(seq.sampling.pooling is not None and count == seq.pending)


def _is_scored(seq: Sequence) -> bool:
    """Return whether its next tokens are of a prompt whose own tokens are scored."""
    return seq.sampling.prompt_logprobs is not None and seq.computed < len(seq.prompt_ids)


def sample_outputs(
    sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], logits: Tensor, drafts: abc.Sequence[list[int]] = ()
) -> list[Output]:
    """Return the outputs of `pack`ed sequences from the float32 logits (R, V) of the rows to sample, in their order.

    The output of a sequence whose prompt is not complete is None, or the scores of the prompt's tokens. That of one with
    drafts is a TokenRun.
    """
    outputs: list[Output] = [None] * len(sequences)
    first = 0
    are_scored = [not seq.sampling.is_drawn and _is_scored(seq) for seq in sequences]
    # Sample rows in place, in one call for each run between scored prompts: copying rows out would cost more than sampling.
    for scored, part in itertools.groupby(range(len(sequences)), key=are_scored.__getitem__):
        spans = {i: span for i in part if (span := sample_count(sequences[i], counts[i]))}
        last = first + sum(spans.values())
        rows, first = logits[first:last], last
        members = [sequences[i] for i in spans]
        if scored:
            for i, seq, own in zip(spans, members, torch.split(rows, [*spans.values()])):
                is_complete = counts[i] == seq.pending
                outputs[i] = _score_prompt(seq, own, _draw([seq], (), own[-1:])[0] if is_complete else None)
        elif members:
            for i, output in zip(spans, _draw(members, drafts and [drafts[i] for i in spans], rows)):
                outputs[i] = output
    return outputs


def add_embeddings(
    outputs: list[Output], sequences: abc.Sequence[Sequence], counts: abc.Sequence[int], states: Tensor
) -> None:
    """Set the outputs of `pack`ed sequences that are embedded, from the final states (P, C) of the rows to pool."""
    if len(states):
        states, first = states.double().cpu(), 0
        for i, (seq, count) in enumerate(zip(sequences, counts)):
            if n := pool_count(seq, count):
                outputs[i] = _pool(seq, states[first : first + n], is_complete=count == seq.pending)
                first += n


def _pool(seq: Sequence, rows: Tensor, is_complete: bool) -> Output:
    """Return a prompt's embedding, or the sum of its states so far (C), from float64 rows (n, C), which may change."""
    # Row by row, on from the sum of the pieces before: the bits must not depend on where a prompt was cut. NumPy adds
    # whole rows in their order, as it sums pairwise only along the axis that lies together in memory.
    if seq.prompt_details:
        rows[0] += seq.prompt_details[-1]
    total = torch.from_numpy(np.add.reduce(rows.numpy(), axis=0))
    if not total.isfinite().all():
        return NotFinite()
    if not is_complete:
        return Token(None, None, [total])
    # A mean need not be divided by the number of its rows: the direction is the same.
    return Token(0, None, [array("f", F.normalize(total, dim=0).float().tolist())])


def _draw(sequences: abc.Sequence[Sequence], drafts: abc.Sequence[list[int]], logits: Tensor) -> list[Output]:
    """Return the next tokens of each sequence, from the rows of its pending token and of its drafts (R, V).

    Row j of a sequence draws the token after `drafts[:j]`, with the random number and the history that this token has in
    a step of its own. `drafts` are those of each sequence, or nothing at all.
    """
    members: list[tuple[Sequence, abc.Sequence[int]]] = [*zip(sequences, itertools.repeat(()))]
    if drafts:
        members = [(seq, own[:j]) for seq, own in zip(sequences, drafts) for j in range(len(own) + 1)]
    params = [seq.sampling for seq, _ in members]
    positions = torch.tensor([seq.length + len(before) for seq, before in members], dtype=torch.int64)

    def history(row: int) -> History:
        seq, before = members[row]
        return History(seq.prompt_ids, [*seq.output_ids, *before] if before else seq.output_ids)

    tokens = Draws(params, logits.device).draw(logits, positions, history)
    details: list[TokenLogprobs | None] = [None] * len(members)
    # All log probabilities in one call, and only of the rows that want them.
    scored = [
        (row, token, p.logprobs)
        for row, (token, p) in enumerate(zip(tokens, params))
        if p.logprobs is not None and isinstance(token, int)
    ]
    if scored:
        chosen, ids, counts = zip(*scored)
        # In a tenth of the time of `logits[chosen]`.
        picked = logits.index_select(0, torch.tensor(chosen, device=logits.device))
        for row, detail in zip(chosen, logprobs(picked, ids, counts)):
            details[row] = detail
    if not drafts:
        return [token if detail is None else Token(detail.token, detail) for token, detail in zip(tokens, details)]
    outputs, first = [], 0
    for own in drafts:
        last = first + len(own) + 1
        outputs.append(_run(own, tokens[first:last], details[first:last]))
        first = last
    return outputs


def _run(drafts: list[int], tokens: abc.Sequence[int | Failure], details: abc.Sequence[TokenLogprobs | None]) -> Output:
    """Return a TokenRun, or the one token of a sequence without drafts."""
    run = run_of(drafts, tokens)
    # A row behind the first that failed is dropped here: its token comes up again, and fails, in the next step.
    ids = [token for token in run if isinstance(token, int)]
    if not ids:
        return run[0]
    if drafts:
        return TokenRun(ids, [detail for detail in details[: len(ids)] if detail is not None])
    return ids[0] if details[0] is None else Token(ids[0], details[0])


def _score_prompt(seq: Sequence, logits: Tensor, drawn: Output) -> Output:
    """Return the log probabilities of the prompt tokens that the rows of this piece predict, with the token drawn behind it."""
    if isinstance(drawn, Exception):
        return drawn
    targets = seq.prompt_ids[seq.computed + 1 : seq.computed + 1 + len(logits)]
    n = seq.sampling.prompt_logprobs or 0
    scores = logprobs(logits[: len(targets)], targets, [n] * len(targets), ranks=True)
    token = drawn if isinstance(drawn, Token) else Token(drawn if isinstance(drawn, int) else None)
    return token._replace(prompt_details=scores)

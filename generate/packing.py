"""A plan's tokens as one packed row, and the row's logits as the plan's outputs; the same on every device.

It must not know pages, attention, queues or policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import NamedTuple

from torch import Tensor

from generate.sampling import History, logprobs, sample
from scheduling.scheduler import Output, Token
from scheduling.sequence import Sequence


class Packed(NamedTuple):
    """M tokens in one row: their ids and positions, and the rows to sample, whose logits are needed."""

    ids: list[int]
    positions: list[int]
    sample_rows: list[int]


def pack(sequences: Many[Sequence], counts: Many[int]) -> Packed:
    """Lay the next `counts[i]` tokens of `sequences[i]` one after the other."""
    packed = Packed([], [], [])
    for seq, count in zip(sequences, counts):
        packed.ids.extend(seq.tokens(seq.computed, count))
        packed.positions.extend(range(seq.computed, seq.computed + count))
        end = len(packed.ids)
        packed.sample_rows.extend(range(end - sample_count(seq, count), end))
    return packed


def sample_count(seq: Sequence, count: int) -> int:
    """Return how many of a piece's last rows are sampled: one at the end of the prompt, all if the prompt is scored."""
    if seq.sampling.prompt_logprobs is not None and seq.computed < len(seq.prompt_ids):
        return count
    return int(count == seq.pending)


def sample_outputs(sequences: Many[Sequence], counts: Many[int], logits: Tensor) -> list[Output]:
    """Return the outputs of `pack`ed sequences from the float32 logits (R, V) of the rows to sample, in their order.

    The output of a sequence whose prompt is not complete is None, or the scores of the prompt's tokens.
    """
    spans = [sample_count(s, n) for s, n in zip(sequences, counts)]
    outputs: list[Output] = [None] * len(spans)
    if not any(spans):
        return outputs
    ends = [*itertools.accumulate(spans)]
    ready = [i for i, s in enumerate(sequences) if counts[i] == s.pending]  # the sequences that get a token
    rows = logits[: ends[-1]]
    if len(ready) < len(rows):
        rows = logits[[ends[i] - 1 for i in ready]]
    _sample_tokens([sequences[i] for i in ready], rows, ready, outputs)
    for i, seq in enumerate(sequences):
        if seq.sampling.prompt_logprobs is not None and spans[i]:
            outputs[i] = _score_prompt(seq, outputs[i], logits[ends[i] - spans[i] : ends[i]])
    return outputs


def _sample_tokens(members: list[Sequence], rows: Tensor, indices: list[int], outputs: list[Output]) -> None:
    """Put a token for each row, with log probabilities where they are requested, into `outputs` at its index."""
    params = [s.sampling for s in members]
    histories = [History(s.prompt_ids, s.output_ids) for s in members]
    tokens = sample(rows, params, [s.length for s in members], histories)
    scored: list[tuple[int, int, int]] = []  # row, token, number of alternatives
    for row, (i, token) in enumerate(zip(indices, tokens)):
        outputs[i] = token
        count = params[row].logprobs
        if count is not None and isinstance(token, int):
            scored.append((row, token, count))
    if scored:
        chosen, ids, counts = zip(*scored)
        for row, detail in zip(chosen, logprobs(rows[[*chosen]], ids, counts)):
            outputs[indices[row]] = Token(detail.token, detail)


def _score_prompt(seq: Sequence, output: Output, logits: Tensor) -> Output:
    """Add the log probabilities of the prompt tokens that the rows of this piece predict."""
    if isinstance(output, BaseException):
        return output
    targets = seq.prompt_ids[seq.computed + 1 : seq.computed + 1 + len(logits)]
    n = seq.sampling.prompt_logprobs or 0
    scores = logprobs(logits[: len(targets)], targets, [n] * len(targets), ranks=True)
    token, detail = output[:2] if isinstance(output, Token) else (output, None)
    return Token(token, detail, scores)

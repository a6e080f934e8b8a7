"""A plan's tokens as one packed row, and the row's logits as the plan's outputs; the same on every device.

It must not know pages, attention, queues or policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from generate.sampling import Draws, History, NotFinite, logprobs, sample
from scheduling.advance import Output, Run, Token, run_of
from scheduling.sequence import Sequence


class Packed(NamedTuple):
    """M tokens in one row: their ids and positions, and the rows to sample, whose logits are needed."""

    ids: list[int]
    positions: list[int]
    sample_rows: list[int]


def pack(sequences: Many[Sequence], counts: Many[int], drafts: Many[list[int]] = ()) -> Packed:
    """Lay the next `counts[i]` tokens of `sequences[i]`, its drafts the last of them, one after the other."""
    packed = Packed([], [], [])
    for i, (seq, count) in enumerate(zip(sequences, counts)):
        packed.ids.extend(seq.tokens(seq.computed, count))
        if drafts:
            packed.ids.extend(drafts[i])
        packed.positions.extend(range(seq.computed, seq.computed + count))
        end = len(packed.ids)
        packed.sample_rows.extend(range(end - sample_count(seq, count), end))
    return packed


def sample_count(seq: Sequence, count: int) -> int:
    """Return how many of a piece's last rows are sampled: one at the end of the prompt, all if the prompt is scored.

    Of a decode with drafts these are all rows, too.
    """
    if _is_scored(seq):
        return count
    return max(0, count - seq.pending + 1)


def _is_scored(seq: Sequence) -> bool:
    """Return whether its next tokens are of a prompt whose own tokens are scored."""
    return seq.sampling.prompt_logprobs is not None and seq.computed < len(seq.prompt_ids)


def sample_outputs(
    sequences: Many[Sequence], counts: Many[int], logits: Tensor, drafts: Many[list[int]] = ()
) -> list[Output]:
    """Return the outputs of `pack`ed sequences from the float32 logits (R, V) of the rows to sample, in their order.

    The output of a sequence whose prompt is not complete is None, or the scores of the prompt's tokens. That of one with
    drafts is a Run.
    """
    outputs: list[Output] = [None] * len(sequences)
    first = 0
    # Rows are drawn where they lie, those between two scored prompts together: a copy of some takes longer than drawing.
    for scored, part in itertools.groupby(range(len(sequences)), key=lambda i: _is_scored(sequences[i])):
        spans = {i: span for i in part if (span := sample_count(sequences[i], counts[i]))}
        last = first + sum(spans.values())
        rows, first = logits[first:last], last
        if not scored:
            _sample_tokens(sequences, [*spans], rows, drafts, outputs)
            continue
        for i, own in zip(spans, torch.split(rows, [*spans.values()]) if spans else ()):
            if counts[i] == sequences[i].pending:
                _sample_tokens(sequences, [i], own[-1:], (), outputs)
            outputs[i] = _score_prompt(sequences[i], outputs[i], own)
    return outputs


def _sample_tokens(
    sequences: Many[Sequence], indices: list[int], rows: Tensor, drafts: Many[list[int]], outputs: list[Output]
) -> None:
    """Put what the sequences at `indices` get from their rows (R, V) into `outputs` at these indices."""
    if not indices:
        return
    members = [sequences[i] for i in indices]
    if drafts:
        for i, output in zip(indices, sample_runs(members, [drafts[i] for i in indices], rows)):
            outputs[i] = output if drafts[i] else _only(output)
        return
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
        picked = rows.index_select(0, torch.tensor(chosen, device=rows.device))  # a tenth of the time of rows[chosen]
        for row, detail in zip(chosen, logprobs(picked, ids, counts)):
            outputs[indices[row]] = Token(detail.token, detail)


def _only(run: Output) -> Output:
    """Return the one token of a sequence without drafts, or its failure."""
    if not isinstance(run, Run):
        return run
    return Token(run.ids[0], run.details[0]) if run.details else run.ids[0]


def sample_runs(sequences: Many[Sequence], drafts: Many[list[int]], logits: Tensor) -> list[Output]:
    """Return the tokens of sequences that decode with drafts, from the rows of their pending tokens and drafts.

    Row j of a sequence draws the token after `drafts[:j]`, with the number and the history that it has one by one.
    """
    members = [(seq, own, j) for seq, own in zip(sequences, drafts) for j in range(len(own) + 1)]
    params = [seq.sampling for seq, _, _ in members]

    def history(row: int) -> History:
        seq, own, j = members[row]
        return History(seq.prompt_ids, [*seq.output_ids, *own[:j]])

    positions = torch.tensor([seq.length + j for seq, _, j in members], dtype=torch.int64)
    tokens = Draws(params, logits.device).draw(logits, positions, history)
    outputs, first = [], 0
    for seq, own in zip(sequences, drafts):
        last = first + len(own) + 1
        outputs.append(_run(seq, own, tokens[first:last], logits[first:last]))
        first = last
    return outputs


def _run(seq: Sequence, drafts: list[int], tokens: Many[int | NotFinite], logits: Tensor) -> Output:
    run = run_of(drafts, tokens)
    failed = run[-1]
    ids = [token for token in run if isinstance(token, int)]
    if isinstance(failed, NotFinite) and not ids:
        return failed  # otherwise it is the next step that fails
    count = seq.sampling.logprobs
    return Run(ids, [] if count is None else logprobs(logits[: len(ids)], ids, [count] * len(ids)))


def _score_prompt(seq: Sequence, output: Output, logits: Tensor) -> Output:
    """Add the log probabilities of the prompt tokens that the rows of this piece predict."""
    if isinstance(output, BaseException | Run):  # a run is behind the prompt
        return output
    targets = seq.prompt_ids[seq.computed + 1 : seq.computed + 1 + len(logits)]
    n = seq.sampling.prompt_logprobs or 0
    scores = logprobs(logits[: len(targets)], targets, [n] * len(targets), ranks=True)
    token, detail = output[:2] if isinstance(output, Token) else (output, None)
    return Token(token, detail, scores)

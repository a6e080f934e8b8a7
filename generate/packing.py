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
    if drafts:
        return _sample_with_drafts(sequences, counts, logits, drafts)
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


def _sample_with_drafts(
    sequences: Many[Sequence], counts: Many[int], logits: Tensor, drafts: Many[list[int]]
) -> list[Output]:
    """Return the outputs of a step in which some sequences have drafts."""
    outputs: list[Output] = [None] * len(counts)
    spans = [*map(sample_count, sequences, counts)]
    due = [i for i, span in enumerate(spans) if span]
    scored = [i for i in due if not drafts[i] and _is_scored(sequences[i])]
    if scored:  # in a step with drafts, which is rare
        pieces = dict(zip(range(len(spans)), torch.split(logits, spans)))
        rows = torch.cat([pieces[i] for i in scored])
        prompts, some = [sequences[i] for i in scored], [counts[i] for i in scored]
        for i, output in zip(scored, sample_outputs(prompts, some, rows)):
            outputs[i] = output
        due = [i for i in due if i not in scored]
        logits = torch.cat([pieces[i] for i in due])
    # All rows are drawn together where they lie: picking some of them takes longer than a step of a small model.
    runs = sample_runs([sequences[i] for i in due], [drafts[i] for i in due], logits)
    for i, output in zip(due, runs):
        single = isinstance(output, Run) and not drafts[i]
        outputs[i] = _only(output) if single else output
    return outputs


def _only(run: Output) -> Output:
    """Return the one token of a sequence without drafts."""
    assert isinstance(run, Run)
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
    if isinstance(output, BaseException | Run):  # a run is behind the prompt
        return output
    targets = seq.prompt_ids[seq.computed + 1 : seq.computed + 1 + len(logits)]
    n = seq.sampling.prompt_logprobs or 0
    scores = logprobs(logits[: len(targets)], targets, [n] * len(targets), ranks=True)
    token, detail = output[:2] if isinstance(output, Token) else (output, None)
    return Token(token, detail, scores)

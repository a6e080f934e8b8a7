"""Append the outputs of a step to its sequences. This module must not know which sequences join or leave."""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from scheduling.iteration import Drafted, Plan
from scheduling.sequence import Sequence

T = TypeVar("T")


class Token(NamedTuple):
    """A token with what else is known of it; `prompt_details` belong to prompt tokens of the same step."""

    id: int | None
    detail: Any = None
    prompt_details: list[Any] | None = None


class TokenRun(NamedTuple):
    """The tokens that a sequence with drafts gets in one step, with what else is known of each, if anything is.

    These are the drafts that are right, and one more token: what the sequence would have got one by one.
    """

    ids: abc.Sequence[int]
    details: abc.Sequence[Any] = ()


def run_of(drafts: abc.Sequence[int], tokens: abc.Sequence[T]) -> abc.Sequence[T]:
    """Return the tokens that count: up to the first that is not the draft of its place, that one included.

    `tokens[j]` is the token after the sequence and `drafts[:j]`; there is one more than there are drafts.
    """
    for j, (draft, token) in enumerate(zip(drafts, tokens)):
        if draft != token:
            return tokens[: j + 1]
    return tokens


Output = int | Token | TokenRun | BaseException | None  # tokens, the row's own failure, or None if no token is due
OnToken = Callable[[Sequence, float], None]


class Advanced(NamedTuple):
    """The sequences that failed and that finished in a step; `decoding` if all got a token, done or not.

    `drafts` says what became of the drafts, and `rejected` is the part of the rows that computed wrong ones.
    """

    failed: list[Sequence]
    finished: list[Sequence]
    decoding: bool
    drafts: list[Drafted]
    rejected: float


def advance(
    plan: Plan, outputs: list[Output], now: float, on_token: OnToken | None, publish: Callable[[Sequence], None]
) -> Advanced:
    """Append the outputs of a step to its sequences; `publish` is called for each computed prompt, `on_token` for each token."""
    failed: list[Sequence] = []
    finished: list[Sequence] = []
    before = [len(seq.output_ids) for seq in plan.sequences] if plan.drafts else []
    batch, number = len(plan.sequences) + len(plan.held), plan.number
    decoding = not plan.paused
    for seq, count, output in zip(plan.sequences, plan.counts, outputs):
        ids = seq.output_ids
        # Nearly every row of every step takes this branch. It may skip the rest of `_advance_one`: a sequence with an
        # output is past its prompt, so it has no pages to publish and no first token to note; a plain int carries no
        # details and is no failure; and without `stop`, only the length can end it.
        if count == 1 and ids and type(output) is int and seq.stop is None:
            ids.append(output)
            seq.computed += 1
            seq.last_token_at = now
            if len(ids) >= seq.max_tokens:
                seq.finish_reason, seq.state = "length", "held"
                finished.append(seq)
            if on_token is not None:
                on_token(seq, now)
        else:
            _advance_one(seq, count, output, now, on_token, publish)
            if seq.error is not None:
                failed.append(seq)
            elif seq.finish_reason is not None:
                finished.append(seq)
            decoding = decoding and output is not None and seq.pending == 1
        seq.last_iteration = number
        seq.batch_sum += batch
        if batch > seq.batch_max:
            seq.batch_max = batch
    drafts, rejected = _count_drafts(plan, before) if plan.drafts else ([], 0.0)
    return Advanced(failed, finished, decoding, drafts, rejected)


def _count_drafts(plan: Plan, before: list[int]) -> tuple[list[Drafted], float]:
    """Count the drafts of a step and the tokens that they brought, and the part of the rows that computed the others.

    `before` are the lengths of the outputs before the step. A draft behind the end of its text is not accepted.
    """
    counted, rejected = [], 0.0
    for seq, drafts, length in zip(plan.sequences, plan.drafts, before):
        if not drafts:
            continue
        accepted = max(0, len(seq.output_ids) - length - 1)
        seq.drafted += len(drafts)
        seq.accepted += accepted
        counted.append(Drafted(seq.id, len(drafts), accepted))
        rejected += (len(drafts) - accepted) / (1 + len(drafts))
    return counted, rejected


def _advance_one(
    seq: Sequence, count: int, output: Output, now: float, on_token: OnToken | None, publish: Callable[[Sequence], None]
) -> None:
    if isinstance(output, TokenRun):
        _append(seq, output.ids, output.details, now, on_token)
        return
    seq.computed += count
    if isinstance(output, BaseException):
        seq.error, seq.finish_reason = output, "abort"
        return
    detail = None
    if isinstance(output, Token):
        if output.prompt_details and not seq.output_ids:
            seq.prompt_details += output.prompt_details
        detail, output = output.detail, output.id
    if output is None:
        if not seq.pending:  # it would have nothing to compute, and never end
            seq.error = RuntimeError("the model returned no token where one was expected")
            seq.finish_reason = "abort"
        return
    if count > 1 or not seq.output_ids:  # its prompt, or all that it had before a preemption, is computed now
        publish(seq)
    if seq.max_tokens == 0:  # the request was only for the scores of its prompt, or its embedding
        seq.finish_reason, seq.state = "length", "held"
        return
    if seq.first_token_at is None:
        seq.first_token_at = now
    _append_one(seq, output, detail, now, on_token)


def _append(
    seq: Sequence, tokens: abc.Sequence[int], details: abc.Sequence[Any], now: float, on_token: OnToken | None
) -> None:
    """Append the tokens of a run up to the one that ends the sequence, if one does."""
    for token, detail in zip_longest(tokens, details):
        seq.computed += 1  # the keys and values of the token before it
        _append_one(seq, token, detail, now, on_token)
        if seq.finish_reason is not None:
            return


def _append_one(seq: Sequence, token: int, detail: Any, now: float, on_token: OnToken | None) -> None:
    if detail is not None:
        seq.details.append(detail)  # first, as a reader that ends it now goes by the number of tokens
    seq.output_ids.append(token)
    seq.last_token_at = now
    try:
        seq.finish_reason = seq.stop(token) if seq.stop else None
    except Exception as error:  # a request's own `stop` must not fail its neighbors
        seq.error, seq.finish_reason = error, "abort"
        return
    if seq.finish_reason is None and len(seq.output_ids) >= seq.max_tokens:
        seq.finish_reason = "length"
    if seq.finish_reason is not None:
        seq.state = "held"
    if on_token is not None:
        on_token(seq, now)

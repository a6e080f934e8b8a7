"""Apply the outputs of a step to its sequences. This module must not know which sequences join or leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from scheduling.iteration import Plan
from scheduling.sequence import Sequence


class Token(NamedTuple):
    """A token with what else is known of it; `prompt_details` belong to prompt tokens of the same step."""

    id: int | None
    detail: Any = None
    prompt_details: list[Any] | None = None


Output = int | Token | BaseException | None  # a token, the row's own failure, or None if no token is due
OnToken = Callable[[Sequence, float], None]


class Advanced(NamedTuple):
    """The sequences that failed and that finished in a step; `steady` if all decoded and none of them is done."""

    failed: list[Sequence]
    finished: list[Sequence]
    steady: bool


def advance(
    plan: Plan, outputs: list[Output], now: float, on_token: OnToken | None, publish: Callable[[Sequence], None]
) -> Advanced:
    """Append the outputs of a step to its sequences; `publish` is called for each prompt that is computed."""
    failed: list[Sequence] = []
    finished: list[Sequence] = []
    batch, number = len(plan.sequences) + len(plan.held), plan.number
    steady = not plan.paused
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
            steady = steady and count == 1 and seq.pending == 1
        seq.last_iteration = number
        seq.batch_sum += batch
        if batch > seq.batch_max:
            seq.batch_max = batch
    return Advanced(failed, finished, steady and not failed and not finished)


def _advance_one(
    seq: Sequence, count: int, output: Output, now: float, on_token: OnToken | None, publish: Callable[[Sequence], None]
) -> None:
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
        if not seq.pending:  # it would have nothing to compute and never end
            seq.error = RuntimeError("the model returned no token where one was expected")
            seq.finish_reason = "abort"
        return
    if count > 1 or not seq.output_ids:
        publish(seq)
    if seq.max_tokens == 0:  # the request was only for the scores of its prompt
        seq.finish_reason, seq.state = "length", "held"
        return
    seq.output_ids.append(output)
    if detail is not None:
        seq.details.append(detail)
    seq.last_token_at = now
    if seq.first_token_at is None:
        seq.first_token_at = now
    try:
        seq.finish_reason = seq.stop(output) if seq.stop else None
    except Exception as error:  # a request's own `stop` must not fail its neighbors
        seq.error, seq.finish_reason = error, "abort"
        return
    if seq.finish_reason is None and len(seq.output_ids) >= seq.max_tokens:
        seq.finish_reason = "length"
    if seq.finish_reason is not None:
        seq.state = "held"
    if on_token is not None:
        on_token(seq, now)

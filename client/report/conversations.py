"""Conversations turn by turn: the time to the first token, and the hits in the prefix cache; programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import measure, programs
from .measure import Outcome, statistics_ms


def result(outcomes: Sequence[Outcome], known: Mapping[str, tuple[int, float | None]], **facts: Any) -> dict[str, Any]:
    """Return the result object of a run with its `turns` and `programs`, which are None unless it had some.

    `known` are the calls of each program, and the seconds of its longest path alone.
    """
    found, each = programs.of(outcomes, known)
    return {**measure.result(outcomes, **facts), "turns": turns(outcomes), "programs": found, "program_times": each}


def turns(outcomes: Sequence[Outcome]) -> list[dict[str, Any]] | None:
    """Return the figures of each turn; None if there are no conversations."""
    answered = [o for o in outcomes if o.turn and not o.error]
    last = max((o.turn or 0 for o in answered), default=0)
    if last < 2:
        return None
    rows: list[dict[str, Any]] = []
    for turn in range(1, last + 1):
        done = [o for o in answered if o.turn == turn]
        rows.append(
            {
                "turn": turn,
                "completed": len(done),
                "prompt_tokens": _sum([o.prompt_tokens for o in done]),
                "cached_tokens": _sum([o.cached_tokens for o in done]),
                "output_tokens": sum(o.tokens for o in done),
                **statistics_ms("ttft", [o.ttft for o in done if o.ttft is not None]),
                **statistics_ms("e2el", [o.latency for o in done]),
            }
        )
    return rows


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None

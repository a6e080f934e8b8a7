"""Conversations turn by turn: the time to the first token, and the hits in the prefix cache, measured and expected; programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import measure, programs
from .measure import Outcome, RunFacts, statistics_ms


def result(outcomes: Sequence[Outcome], facts: RunFacts) -> dict[str, Any]:
    """Return the result object of a run with its `turns` and `programs`, which are None unless it had some."""
    numbers = measure.result(outcomes, facts)
    engine = (facts.server_after or {}).get("engine") or {}
    pages = engine.get("kv") if isinstance(engine, dict) else None
    found, each = programs.of(outcomes, facts.programs)
    size = pages.get("page_size") if isinstance(pages, dict) else None
    return {**numbers, "turns": turns(outcomes, size), "programs": found, "program_times": each}


def turns(outcomes: Sequence[Outcome], page_size: int | None) -> list[dict[str, Any]] | None:
    """Return the figures of each turn; None if there are no conversations.

    `expected_cached_tokens` are the tokens, in whole KV pages, that the server computed for the turn before: its prompt,
    and its answer except the last token. It is None without a page size, and for the first turn. More are cached if
    conversations begin alike; fewer if pages were evicted, or if the answer's text tokenizes to other tokens than the
    model generated.
    """
    answered = {(o.user, o.turn): o for o in outcomes if o.turn and not o.error}
    last = max((turn for _, turn in answered if turn), default=0)
    if last < 2:
        return None
    rows: list[dict[str, Any]] = []
    for turn in range(1, last + 1):
        done = [o for (_, number), o in answered.items() if number == turn]
        expected = [_expected(o, answered.get((o.user, turn - 1)), page_size) for o in done]
        rows.append(
            {
                "turn": turn,
                "completed": len(done),
                "prompt_tokens": _sum([o.prompt_tokens for o in done]),
                "cached_tokens": _sum([o.cached_tokens for o in done]),
                "expected_cached_tokens": _sum(expected),
                "output_tokens": sum(o.tokens for o in done),
                **statistics_ms("ttft", [o.ttft for o in done if o.ttft is not None]),
                **statistics_ms("e2el", [o.latency for o in done]),
            }
        )
    return rows


def _expected(outcome: Outcome, before: Outcome | None, page_size: int | None) -> int | None:
    if before is None or before.prompt_tokens is None or outcome.prompt_tokens is None or not page_size:
        return None
    # The last token of a prompt is always computed, because the first token of the answer comes from it.
    computed = min(before.prompt_tokens + before.tokens, outcome.prompt_tokens) - 1
    return computed // page_size * page_size


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None

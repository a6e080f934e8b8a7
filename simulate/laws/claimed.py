"""Which laws a policy claims to keep, and which not, in words."""

from __future__ import annotations

import textwrap
from math import inf

from scheduling.claims import Claims
from simulate.laws import fairness, laws, overtaking

WIDTH = 79


def describe(claims: Claims) -> list[str]:
    """Return lines for people with the laws that depend on claims: those that are claimed, and the others."""
    kept = _laws(claims)
    claimed = [law + (f" ({words})" if words else "") for law, words in kept.items() if words is not None]
    others = [law for law, words in kept.items() if words is None]
    if overtaking.LAW in others:
        others[others.index(overtaking.LAW)] += " (any amount of later work may pass a request)"
    lines = (f"{head}: {'; '.join(items) or 'none'}" for head, items in (("claimed", claimed), ("not claimed", others)))
    return [textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines]


def _laws(claims: Claims) -> dict[str, str | None]:
    """Return each such law with what else is claimed about it, or None if the law is not claimed."""
    has_guard, has_window = claims.guard < inf, claims.overtakes < inf
    tokens = claims.overtaking_tokens
    bound = f"at most {tokens:,g} tokens of later work pass a request" if tokens else "no later work passes a request"
    bound += f" that has waited for {claims.guard:g}" if has_guard else ""
    bound += f", not counting arrivals within {claims.overtakes:g} of it" if has_window else ""
    return {
        laws.WORK: "" if claims.conserving else None,
        overtaking.LAW: bound if claims.overtaking_tokens < inf else None,
        laws.GUARD: f"after {claims.guard:g}" if has_guard else None,
        fairness.LAW: "" if claims.fair else None,
        laws.ONCE: "" if claims.computes_once else None,
        laws.REFUSED: None if claims.refuses else "",
        **({laws.LATE: "" if claims.refuses_only_late else None} if claims.refuses else {}),
        **({laws.WINDOW: f"by arrivals within {claims.overtakes:g}"} if has_window else {}),
    }

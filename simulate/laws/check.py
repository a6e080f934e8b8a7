"""Try a policy on thousands of small random cases and some large ones, and report in plain words which law it breaks.

`check("dynamic+vtc")` or `check("path/to/my_policy.py")`. The laws are in `laws.py` and `purity.py`, the cases in
`cases.py`. Small cases come first; they are quick and easy to read. Large cases find what shows only after many joins,
with many running, or in long prompts. The case that breaks a law is made as small as it gets (`shrink.py`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf

import policies
from scheduling.claims import Claims
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate.laws import fairness, laws, overtaking
from simulate.laws.case import Case
from simulate.laws.cases import FEWER_RIVALS, RIVALS, describe, make_cases, make_large_cases
from simulate.laws.exhaustive import DEFAULT_SCOPE, Scope, explore
from simulate.laws.laws import Broken
from simulate.laws.purity import check_purity
from simulate.laws.shrink import Shrinker
from simulate.laws.trial import try_case

CASES = 2000
LARGE_CASES = 8
WIDTH = 79
TWICE = 4  # one case in this many runs twice, to see whether the second run equals the first

Progress = Callable[[int], None]
Maker = Callable[[int], Policy]


@dataclass(frozen=True)
class Verdict:
    """What came of a check: `broken` and the smallest `case` found, or neither; `cases` and `large` were tried.

    `claims` are those of a policy that keeps the laws.
    """

    policy: str
    cases: int
    large: int = 0
    broken: Broken | None = None
    case: Case | None = None
    scope: Scope | None = None
    states: int = 0
    claims: Claims | None = None

    def __str__(self) -> str:
        if self.broken is None:
            where = f"{self.cases:,} small and {self.large:,} large cases"
            if self.scope is not None:
                where = f"{self.scope}: {self.states:,} states, {self.cases:,} runs"
            claims = describe_claims(self.claims) if self.claims is not None else []
            return "\n".join([f"{self.policy} keeps every law in {where}", *claims])
        lines = [f"{self.policy} breaks a law ({self.broken.law}): {self.broken.words}"]
        if self.case is not None:
            which = f"large case {self.large:,}" if self.large else f"small case {self.cases:,}"
            which = f"run {self.cases:,} of {self.scope}" if self.scope is not None else which
            lines += ["", f"the smallest case found that shows it, reduced from {which}:"]
            lines += describe(self.case)
        return "\n".join(lines)


def describe_claims(claims: Claims) -> list[str]:
    """Return lines for people with the laws that depend on claims: those that are claimed, and the others."""
    kept = _laws_of(claims)
    claimed = [law + (f" ({words})" if words else "") for law, words in kept.items() if words is not None]
    others = [law for law, words in kept.items() if words is None]
    if overtaking.LAW in others:
        others[others.index(overtaking.LAW)] += " (any amount of later work may pass a request)"
    lines = (f"{head}: {'; '.join(items) or 'none'}" for head, items in (("claimed", claimed), ("not claimed", others)))
    return [textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines]


def _laws_of(claims: Claims) -> dict[str, str | None]:
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
        laws.REFUSED: None if claims.refuses else "",
        **({laws.LATE: "" if claims.refuses_only_late else None} if claims.refuses else {}),
        **({laws.WINDOW: f"by arrivals within {claims.overtakes:g}"} if has_window else {}),
    }


def check(
    name: str,
    cases: int = CASES,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    large: int = LARGE_CASES,
    progress: Progress | None = None,
) -> Verdict:
    """Test the policy with this name, or in this file, on `cases` and `large` cases; ValueError if it does not exist."""
    make: Maker = partial(policies.policy_maker(name), options=options)
    policy, number, case = make(4), 0, None
    # Long queues show who is served unfairly or too late. A policy that promises neither has no use for the time they take.
    rivals = RIVALS if policy.claims.fair or policy.claims.guard < inf else FEWER_RIVALS
    try:
        check_purity(policy)
        for number, case in enumerate(chain(make_cases(cases, seed, rivals), make_large_cases(large, seed)), 1):
            try_case(make, case, make_scheduler, number % TWICE == 1)
            if progress is not None:
                progress(number)
    except Broken as broken:
        smallest = (broken, None) if case is None else _smallest(make, make_scheduler, case, broken)
        return Verdict(name, min(number, cases), max(0, number - cases), *smallest)
    return Verdict(name, cases, large, claims=policy.claims)


def check_exhaustively(
    name: str,
    scope: Scope = DEFAULT_SCOPE,
    options: Mapping[str, object] | None = None,
    progress: Progress = lambda runs: None,
) -> Verdict:
    """Decide whether the policy keeps the laws in a whole scope (`exhaustive.py`); ValueError if it does not exist."""
    make: Maker = partial(policies.policy_maker(name), options=options)
    policy = make(scope.slots)
    try:
        check_purity(policy)
    except Broken as broken:
        return Verdict(name, 0, broken=broken, scope=scope)
    found = explore(make, scope, progress)
    if found.broken is None or found.case is None:
        return Verdict(name, found.runs, scope=scope, states=found.states, claims=policy.claims)
    smallest = _smallest(make, Scheduler, found.case, found.broken)
    return Verdict(name, found.runs, 0, *smallest, scope, found.states)


def _smallest(make: Maker, make_scheduler: Callable[..., Scheduler], case: Case, broken: Broken) -> tuple[Broken, Case]:
    """Return the smallest case found that breaks the same law, and how."""

    def again(simpler: Case) -> Broken | None:
        try:
            try_case(make, simpler, make_scheduler, broken.law == "repeatable")
        except Broken as other:
            return other if other.law == broken.law else None
        return None

    return Shrinker(again, case, broken).run()

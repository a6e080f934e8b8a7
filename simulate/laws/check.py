"""Try a policy on thousands of small random cases and some large ones, and report in plain words which law it breaks.

`check("dynamic+vtc")` or `check("path/to/my_policy.py")`. The laws are in `laws.py` and `purity.py`, the cases in
`cases.py`. Small cases come first; they are quick and easy to read. Large cases find what shows only after many joins,
with many running, or in long prompts. The case that breaks a law is made as small as it gets (`shrink.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import policies
from scheduling.claims import Claims
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate.laws import claimed
from simulate.laws.case import Case
from simulate.laws.cases import describe, make_cases, make_large_cases
from simulate.laws.exhaustive import DEFAULT_SCOPE, Scope, explore
from simulate.laws.laws import Broken
from simulate.laws.purity import check_purity
from simulate.laws.shrink import Shrinker
from simulate.laws.trial import try_case

CASES = 2000
LARGE_CASES = 8
TWICE = 4  # one small case in this many runs twice, to see whether the second run equals the first

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
            claims = claimed.describe(self.claims) if self.claims is not None else []
            return "\n".join([f"{self.policy} keeps every law in {where}", *claims])
        lines = [f"{self.policy} breaks a law ({self.broken.law}): {self.broken.words}"]
        if self.case is not None:
            which = f"large case {self.large:,}" if self.large else f"small case {self.cases:,}"
            which = f"run {self.cases:,} of {self.scope}" if self.scope is not None else which
            lines += ["", f"the smallest case found that shows it, reduced from {which}:"]
            lines += describe(self.case)
        return "\n".join(lines)


def first_broken(
    name: str, cases: int, options: Mapping[str, object] | None, is_over: Callable[[], bool]
) -> Verdict | None:
    """Return which law one of the first cases breaks, as it is, None if none does; no case begins when `is_over`."""
    make: Maker = partial(policies.policy_maker(name), options=options)
    try:
        check_purity(make(4))
        for case in make_cases(cases, 0):
            if is_over():
                break
            try_case(make, case, twice=False)
    except Broken as broken:
        return Verdict(name, cases, broken=broken)
    return None


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
    policy = make(4)
    try:
        check_purity(policy)
    except Broken as broken:
        return Verdict(name, 0, 0, broken)
    every_case = chain(make_cases(cases, seed), make_large_cases(large, seed))
    for number, case in enumerate(every_case, 1):
        try:
            try_case(make, case, make_scheduler, number % TWICE == 0 or number > cases)
        except Broken as broken:
            smallest = _smallest(make, make_scheduler, case, broken)
            return Verdict(name, min(number, cases), max(0, number - cases), *smallest)
        if progress is not None:
            progress(number)
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

"""Cached pages that a policy pins for the next call of a session, and that they block nobody."""

from __future__ import annotations

from math import inf
from typing import Any

from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.laws.cases import make_cases
from simulate.laws.trial import try_case
from tests.support.scheduling import drive


class Pinning(Policy):
    def __init__(self, max_batch_size: int, seconds: float = inf, **options: Any) -> None:
        super().__init__(max_batch_size, **options)
        self.seconds = seconds

    def keep_until(self, seq: Sequence, now: float) -> float:
        return now + self.seconds if seq.session else now


def call(first: int, at: float, tokens: int = 9, session: str = "") -> Sequence:
    """Return a request whose prompt begins with a token of its own; it takes four pages of four tokens."""
    return Sequence([first] * tokens, 16 - tokens, id=f"{first}@{at:g}", arrived_at=at, session=session)


def served(policy: Policy, *sequences: Sequence) -> Scheduler:
    """Serve requests that come one by one with 8 pages, a second for each step."""
    scheduler = Scheduler(policy, PagePool(9, 4))
    drive(scheduler, list(sequences), cost=lambda plan: 1.0)
    return scheduler


def chat(policy: Policy) -> int:
    """Return how many tokens the second call of a session finds after three others have used all other pages."""
    again = call(1, 500.0, session="s")
    served(policy, call(1, 0.0, session="s"), *(call(other, 100.0 * other) for other in (2, 3, 4)), again)
    return again.cached


def test_pinned_pages_are_found_when_the_session_goes_on() -> None:
    assert (chat(Policy(1)), chat(Pinning(1)), chat(Pinning(1, 50.0))) == (0, 8, 0)


def test_a_pin_ends_when_its_session_goes_on_its_time_has_passed_or_the_policy_changes() -> None:
    scheduler = served(Pinning(1, 50.0), call(1, 0.0, session="s"))
    assert len(scheduler.batch.pages.pinned) == 3
    scheduler.plan(1000.0)
    assert not scheduler.batch.pages.pinned
    scheduler = served(Pinning(1), call(1, 0.0, session="s"), call(1, 100.0, session="s"), call(2, 200.0, session="t"))
    assert len(scheduler.batch.pages.pinned) == 6
    scheduler.switch(Policy(1), 300.0)
    assert not scheduler.batch.pages.pinned


def test_a_request_takes_pinned_pages_if_no_others_are_free_the_longest_pinned_first() -> None:
    old, young = call(1, 0.0, session="s"), call(2, 100.0, session="t")
    scheduler = served(Pinning(1), old, young, call(3, 200.0))
    assert scheduler.pages is not None
    assert [scheduler.pages.cached_tokens(seq.hashes) for seq in (old, young)] == [4, 12]


def test_endless_pins_keep_every_law() -> None:
    class Endless(Pinning):
        def keep_until(self, seq: Sequence, now: float) -> float:
            return inf if seq.program else now

    pinned = 0
    for case in make_cases(150, seed=46):
        pinned += bool(try_case(Endless, case, twice=False).scheduler.batch.pages.pinned)
    assert pinned > 10

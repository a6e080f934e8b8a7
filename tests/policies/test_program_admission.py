"""Admission by program: who joins while active programs need KV, and for how long their pages stay."""

from __future__ import annotations

import pytest

import policies
from policies.program_admission import FEW, Pauses
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.scheduling import drive, order_of_admission


def request(name: str, at: float, tokens: int, program: str = "") -> Sequence:
    prompt = [sum(name.encode())] * (tokens - 4)
    return Sequence(prompt, 4, id=name, arrived_at=at, program=program, session=program)


def joined(order: str = "", pages: int = 13, **options: object) -> list[str]:
    """Return in which order requests join three slots, a second for each step; p2 comes while r1 runs, 3 s after p1."""
    policy = policies.get_policy(f"program-admission{order}", 3, options)
    policy._pauses.worth_keeping = lambda pool: 20.0  # type: ignore[attr-defined]
    requests = [
        request("p1", 0, 24, "p"), request("r1", 1, 12), request("large", 5, 28), request("small", 5.5, 8), request("p2", 7, 32, "p"),
    ]  # fmt: skip
    requests[1].max_tokens = 12
    requests[-1].prompt_ids[:20] = requests[0].prompt_ids
    scheduler = Scheduler(policy, PagePool(pages + 1, 4))
    return order_of_admission(drive(scheduler, requests, cost=lambda plan: 1.0))


@pytest.mark.parametrize("order", ["", "+plas", "+vtc"])
def test_a_program_waits_while_active_ones_need_the_pages_and_smaller_requests_pass_it(order: str) -> None:
    assert joined(order) == ["p1", "r1", "small", "p2", "large"]
    assert joined(order, pages=40) == ["p1", "r1", "large", "small", "p2"]


def test_a_request_that_has_waited_too_long_goes_first() -> None:
    assert joined(guard=0) == ["p1", "r1", "large", "small", "p2"]


def pauses(*seconds: float, silent: int = 0) -> Pauses:
    """Return pauses of these lengths, and of programs that never come back, if a prompt token takes 0.5 s."""
    kept = Pauses()
    for i, pause in enumerate((*seconds, *[1e9] * silent)):
        seq = request("a" * (1 + i % 2), 0.0, 8 + i % 3, f"program-{i}")
        seq.scheduled_at, seq.first_token_at = 0.0, 3 + 0.5 * len(seq.prompt_ids)
        kept.begin(seq, 1e6 * i, 100)
        if pause < 1e9:
            kept.end(seq.program, 1e6 * i + pause)
    return kept


def test_a_pin_is_as_long_as_would_have_saved_most() -> None:
    few = FEW // 2
    assert pauses(*[10.0] * few).worth_keeping(100) == pytest.approx(50)  # break-even: 100 tokens of 0.5 s
    assert pauses(*[10.0] * FEW).worth_keeping(100) == pytest.approx(11)
    assert pauses(*[60.0] * FEW).worth_keeping(100) == 0
    # The second pause of each pair costs 20 s x 2 more, and saves 50 s for one of them; of one in four, it saves too little.
    assert pauses(*[10.0, 30.0] * FEW).worth_keeping(100) == pytest.approx(33)
    assert pauses(*[10.0, 10.0, 10.0, 48.0] * FEW, silent=2 * FEW).worth_keeping(100) == pytest.approx(11)

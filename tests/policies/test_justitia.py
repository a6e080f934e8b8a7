"""The order justitia: by hand, and its bound against programs that share the machine evenly (arXiv 2510.17015)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policies
from policies.orders.justitia import volume
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.simulate.test_programs import LATE, NEWCOMER, times
from tests.support.scheduling import drive, make_scheduler
from tests.support.strategies import slots


def test_the_program_that_sharing_would_end_first_goes_first_step_by_step() -> None:
    """By hand, in KV tokens: two programs cost 5 + 5 and 5 + 14. At 5, 5 of them were delivered, so a call of 2 ends at 2.5 + 2."""
    assert times(NEWCOMER, "dynamic+justitia") == [4, 11, 2]
    # Costs of 15 and 5: the second would end at 2 x 5, the first at 20.
    assert times(LATE, "dynamic+justitia") == [8, 3]


def shared_evenly(programs: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return how much is delivered until each program ends, from how much was when it came, and what it costs."""
    ends: dict[str, float] = {}
    left: dict[str, float] = {}
    coming = sorted(programs, key=lambda name: programs[name][0])
    now = 0.0
    while coming or left:
        until = programs[coming[0]][0] if coming else float("inf")
        least = min(left.values(), default=float("inf")) * len(left) if left else float("inf")
        passed = min(until - now, least)
        left = {name: rest - passed / len(left) for name, rest in left.items()}
        now += passed
        for name in [name for name, rest in left.items() if rest <= 1e-9]:
            ends[name] = now
            del left[name]
        while coming and programs[coming[0]][0] <= now:
            name = coming.pop(0)
            left[name] = programs[name][1]
    return ends


CALLS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4)
PROGRAMS = st.lists(st.tuples(st.integers(0, 60), CALLS), min_size=1, max_size=9)


def excess(order: str, some: list[tuple[int, list[tuple[int, int]]]], slots: int, **options: object) -> float:
    """Return by how much more is delivered until a program ends than its bound allows, at most; all its calls come at once."""
    made: list[Sequence] = []
    for number, (at, calls) in enumerate(sorted(some)):
        these = [Sequence([0] * p, o, f"{number}.{k}", at, program=f"p{number}") for k, (p, o) in enumerate(calls)]
        for seq in these:
            seq.program_volume = sum(volume(other, other.max_tokens) for other in these)
        made += these
    came: dict[str, tuple[float, float]] = {}

    def delivered(until: float) -> float:
        return sum(volume(s, s.max_tokens) for s in made if s.finished_at is not None and s.finished_at <= until)

    def planned(scheduler: Scheduler, plan: Plan) -> None:
        for seq in [*scheduler.waiting, *plan.joined]:
            came.setdefault(seq.program, (delivered(plan.started_at), seq.program_volume))

    drive(make_scheduler(f"dynamic+{order}", slots, guard=1e9, **options), made, planned=planned)
    fair = shared_evenly(came)
    longest = max(len(seq.prompt_ids) + seq.max_tokens for seq in made)
    constant = slots * max(volume(seq, seq.max_tokens) for seq in made)
    constant += (slots - 1) * max(seq.max_tokens for seq in made) * longest
    ends = {seq.program: 0.0 for seq in made}
    for seq in made:
        ends[seq.program] = max(ends[seq.program], seq.finished_at or 0.0)
    return max(delivered(end) - fair[name] for name, end in ends.items()) - constant


@given(PROGRAMS, slots)
def test_a_program_ends_at_most_a_constant_later_than_if_all_shared_evenly(
    some: list[tuple[int, list[tuple[int, int]]]], slots: int
) -> None:
    assert excess("justitia", some, slots) <= 1e-6


def test_shortest_first_has_no_such_bound() -> None:
    some = [(0, [(1, 2)]), (1, [(1, 9)]), *((23 * i, [(1, 2)]) for i in range(1, 200))]  # of which each takes 23
    assert excess("justitia", some, 1) <= 0
    assert excess("sjf", some, 1, guard_ratio=1e9) > 0


def test_on_a_server_a_program_costs_as_many_times_its_first_call_as_those_before_did() -> None:
    policy: Any = policies.get_policy("dynamic+justitia", 1)
    for call in range(3):
        seq = Sequence([1], 4, id=str(call), program="old")
        policy.on_arrival(seq, 0.0)
        seq.output_ids = [0] * 4
        policy.on_finish(seq, 1.0)
    begun = policy.virtual
    new = Sequence([1, 1], 4, program="new")
    assert policy.opening(new) - begun == pytest.approx(3 * volume(new, 4))
    assert policy.opening(Sequence([1, 1], 4)) - begun == volume(new, 4)  # a request without a program


def test_a_request_that_ends_before_its_limit_counts_as_served_and_the_memory_is_bounded() -> None:
    policy: Any = policies.get_policy("dynamic+justitia", 1)
    kept = Sequence([1], 1000, program="kept")
    policy.on_arrival(kept, 0.0)  # so that the server is never idle
    for number in range(5000):
        seq = Sequence([1], 100, id=str(number), output_ids=[0])
        policy.on_arrival(seq, 0.0)
        policy.on_finish(seq, 0.0)
    assert len(policy._ends) < 500
    for number in range(5000):
        policy.on_arrival(Sequence([1], 1000, id=str(number), program=f"p{number}"), 0.0)
    assert len(policy._ends) <= 4096

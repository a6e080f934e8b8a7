"""Orders by program, against cases worked out by hand: each step takes one second, prompts have one token."""

from __future__ import annotations

from typing import Any

import pytest

import policies
from client.workloads.programs import joined
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.closed_loop import ClosedLoop
from simulate.simulator import simulate
from tests.simulate.test_programs import LATE, NEWCOMER, SECOND, Program, call, chain, times

EXACT: dict[str, Any] = {"w_p": 0, "w_q": 1}
LEVELS: dict[str, Any] = {**EXACT, "quantum": 0}
ORDERS = ["plas", "atlas", "program-fcfs", "program-gittins", "program-srpt", "vtc-plas"]


def test_the_program_that_came_first_goes_first() -> None:
    assert times(LATE, "dynamic+program-fcfs") == [6, 7]


def test_the_program_that_has_received_least_goes_first() -> None:
    assert times(NEWCOMER) == [6, 10, 6]
    assert times(NEWCOMER, "dynamic+plas", **LEVELS) == times(NEWCOMER, "dynamic+atlas", **LEVELS) == [6, 11, 2]
    assert times(NEWCOMER, "dynamic+program-srpt", **EXACT) == [4, 11, 2]


def test_only_the_longest_of_parallel_calls_counts_for_atlas() -> None:
    wide: Program = (0.0, [call((), 1), call((0,), 3), call((0,), 3), call((1, 2), 2)])
    some = [wide, chain(0.0, 5, 2), chain(3.5, 4, 1)]
    assert times(some, slots=2) == [11, 9, 6.5]
    assert times(some, "dynamic+program-fcfs", 2) == [9, 7, 8.5]
    assert times(some, "dynamic+plas", 2, **LEVELS) == [11, 10, 5.5]
    assert times(some, "dynamic+atlas", 2, **LEVELS) == [10, 11, 5.5]
    assert times(some, "dynamic+program-srpt", 2, **EXACT) == [12, 7, 5.5]


def test_without_known_programs_the_oracle_serves_the_shortest_request_first() -> None:
    policy: Any = policies.get_policy("dynamic+program-srpt", 1)
    short, long = Sequence([1], 4, id="short", program="new"), Sequence([1], 9, id="long", program="old")
    policy.accounts["old"] = 100.0, 0.0
    assert policy.key(short, 0.0) < policy.key(long, 0.0)


@pytest.mark.parametrize("order", ORDERS)
def test_clients_that_name_a_new_program_for_each_call_do_not_fill_the_memory(order: str) -> None:
    policy: Any = policies.get_policy(f"dynamic+{order}", 1)
    scheduler = Scheduler(policy)
    for number in range(4200):
        scheduler.add(Sequence([1], 1, id=str(number), arrived_at=float(number) / 1000, program=f"p{number}"))
        scheduler.step(lambda plan: [7], lambda now=float(number) / 1000: now)  # type: ignore[misc]
    assert len(policy.accounts) == 4096
    assert not policy._before
    assert not getattr(policy, "_lists", None)


def test_a_call_that_is_suspended_and_comes_again_is_charged_once() -> None:
    policy: Any = policies.get_policy("dynamic+plas", 1, EXACT)
    scheduler = Scheduler(policy)
    seq = Sequence([1], 4, program="p")
    scheduler.add(seq)
    for now in (1.0, 2.0):
        scheduler.step(lambda plan: [7], lambda now=now: now)  # type: ignore[misc]
    policy.on_cancel(seq, 2.0)
    policy.on_arrival(seq, 3.0)
    for now in (4.0, 5.0):
        scheduler.step(lambda plan: [7], lambda now=now: now)  # type: ignore[misc]
    assert policy.accounts["p"][0] == 4


def test_gittins_serves_first_what_most_likely_ends_soon() -> None:
    policy: Any = policies.get_policy("dynamic+program-gittins", 1)
    policy._totals = [1.0, 1.0, 10.0]
    assert policy.index(0.0) == pytest.approx(2 / 3)
    assert policy.index(1.0) == pytest.approx(1 / 9)
    assert policy.index(10.0) == 0


def test_gittins_learns_nothing_from_a_program_while_a_call_of_it_waits() -> None:
    policy: Any = policies.get_policy("dynamic+program-gittins", 1)
    still, ended = Sequence([1], 5, program="open"), Sequence([1], 5, program="ended")
    policy.on_arrival(still, 0.0)
    policy.on_arrival(ended, 0.0)
    policy.on_finish(ended, 1.0)
    for now in (100.0, 200.0):
        policy.on_arrival(Sequence([1], 5), now)
        assert "open" in policy.accounts
    assert list(policy._samples) == [0.0]
    assert "ended" not in policy.accounts


def renamer_share(policy: str) -> float:
    """Return the share of tokens of a client that names a new program for each call; another has as many, as long chains."""
    loop = workloads.of_calls(joined(chain(0.0, *[8] * 60) for _ in range(12)), instructions=0).sequences()
    assert isinstance(loop, ClosedLoop)
    for number, seq in enumerate(loop.sequences):
        seq.client = "renames" if number // 60 % 2 else "honest"
        seq.program = f"{number}" if seq.client == "renames" else seq.program
    simulate(Scheduler(policies.get_policy(policy, 4)), loop, SECOND)
    ends = {
        client: [s.finished_at or 0.0 for s in loop.sequences if s.client == client] for client in ("honest", "renames")
    }
    until = min(map(max, ends.values()))  # both always have calls that wait
    honest, renames = (sum(end <= until for end in some) for some in ends.values())
    return renames / (honest + renames)


def test_a_client_that_renames_each_call_gains_under_plas_and_nothing_where_clients_come_first() -> None:
    assert renamer_share("dynamic+plas") > 0.7
    assert renamer_share("dynamic+vtc-plas") == pytest.approx(0.5, abs=0.02)


def test_of_one_client_the_program_that_has_received_least_goes_first() -> None:
    assert times(NEWCOMER, "dynamic+vtc-plas", **LEVELS) == [6, 11, 2]

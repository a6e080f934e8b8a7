"""The laws that every policy keeps, in cases in which calls of programs arrive because others were answered."""

from __future__ import annotations

import random
from bisect import insort
from collections import deque

import pytest

import policies
from client.workloads.programs import Call, joined
from scheduling.iteration import Iteration, Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.closed_loop import ClosedLoop
from simulate.laws.case import Case, Request
from simulate.laws.trial import Trial

LOOPS = [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names())]


class LoopTrial(Trial):
    """A trial whose calls are sent when those that they need are answered; `least` holds them against attained service."""

    def __init__(
        self, loop: ClosedLoop, case: Case, policy: Policy, pool: PagePool | None, least: bool = False
    ) -> None:
        super().__init__(case, Scheduler(policy, pool), list(loop.sequences))
        self.loop, self.least, self.sequences = loop, least, []
        self.arrivals = deque(sorted(loop, key=lambda seq: seq.arrived_at))
        self.had: dict[Sequence, float] = {}

    def add(self, seq: Sequence) -> None:
        ended = (other for other in self.loop.programs[seq.program] if other.finish_reason)
        self.had[seq] = sum(0.2 * (len(s.prompt_ids) - s.cached) + len(s.output_ids) for s in ended)
        self.sequences.append(seq)
        super().add(seq)

    def record(self, iteration: Iteration) -> None:
        super().record(iteration)
        for seq in self.loop.follow(iteration.left, self.now):
            insort(self.arrivals, seq, key=lambda other: other.arrived_at)

    def check_plan(self, plan: Plan) -> None:
        super().check_plan(plan)
        if self.least:
            for seq in plan.joined:
                assert all(self.had[seq] <= self.had[other] for other in self.scheduler.waiting)


def tried(policy: str, number: int, least: bool = False, **options: object) -> LoopTrial:
    """Serve a random case of a few programs in little room."""
    rng = random.Random(number)
    programs = []
    for _ in range(rng.randint(1, 5)):
        calls = []
        for i in range(rng.randint(1, 5)):
            after = tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 2))))) if i else ()
            on = after[-1] if after and rng.random() < 0.5 else None
            calls.append(Call(after, float(rng.choice((0, 0, 30, 200))), on, rng.randint(1, 6), rng.randint(1, 6)))
        programs.append((float(rng.choice((0, 0, 40, 100))), calls))
    loop = workloads.of_calls(joined(programs), instructions=2).sequences()
    assert isinstance(loop, ClosedLoop)
    requests = tuple(Request(0, tuple(seq.prompt_ids), seq.max_tokens) for seq in loop.sequences)
    size = rng.randint(1, 4)
    room = max(seq.total for seq in loop.sequences) // size + 2
    pages = (rng.randint(room, 3 * room), size) if rng.random() < 0.5 else None
    case = Case(
        requests, slots=rng.randint(1, 4), pages=pages, margin=rng.choice((1, 64)), prefix_cache=rng.random() < 0.5
    )
    trial = LoopTrial(loop, case, policies.get_policy(policy, case.slots, options), case.pool(), least)
    trial.run()
    return trial


@pytest.mark.parametrize("policy", LOOPS)
def test_every_policy_keeps_the_laws_with_programs(policy: str) -> None:
    for number in range(15):
        trial = tried(policy, number)
        if all(seq.finish_reason == "length" for seq in trial.sequences):
            assert len(trial.sequences) == len(trial.loop.sequences)
            assert len(trial.loop.times()) == len(trial.loop.programs)


def least_attained(policy: str, **options: object) -> None:
    for number in range(60):
        tried(policy, number, least=True, guard=1e9, **options)


def test_plas_lets_no_program_join_before_one_that_has_received_less() -> None:
    least_attained("dynamic+plas", quantum=0)
    with pytest.raises(AssertionError):  # the law tells other orders apart
        least_attained("dynamic+program-fcfs")

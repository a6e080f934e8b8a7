"""The decisions of every loop and order on a dozen seeded workloads, as digests: a refactoring leaves them equal.

A change of behavior changes them. Write them again, and say why in the commit:

    python -m tests.simulate.test_decisions
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest

import policies
from scheduling.driver import Driver, tokens_due
from scheduling.iteration import Iteration, Plan
from scheduling.scheduler import Output, Scheduler
from simulate.laws.case import Case
from simulate.laws.cases import make_cases, make_large_cases
from simulate.laws.trial import toy_cost
from tests.support import sample

DIGESTS = Path(__file__).parents[1] / "data" / "decisions.json"
POLICIES = [*policies.names(), *(f"dynamic+{order}" for order in policies.order_names()), "static+sjf", "chunked+vtc"]
SMALL, LARGE = 10, 2  # workloads: a few requests in little room, and some hundred in 64 slots
SAME = {"dynamic+fcfs": "dynamic", "triton": "static", "window": "static"}  # without options


class Replay(Driver):
    """Serves a case and keeps the record of each step, on the toy clock of the law checker."""

    def __init__(self, policy: str, case: Case) -> None:
        made = policies.get_policy(policy, case.slots)
        sequences = case.sequences()
        for number, seq in enumerate(sequences):
            seq.program = f"{number % 7 if number < 500 else number // 4}"
        super().__init__(Scheduler(made, case.pool(), case.budget), sequences)
        self.steps: list[Iteration] = []

    def compute(self, plan: Plan) -> list[Output]:
        self.now += toy_cost(plan)
        return tokens_due(plan)

    def record(self, iteration: Iteration) -> None:
        self.steps.append(iteration)


@cache
def workloads() -> list[Case]:
    return [*make_cases(SMALL, seed=38), *make_large_cases(LARGE, seed=38)]


def digest(steps: list[Iteration]) -> str:
    """Return a digest of what happened in each step, without the names of the records' fields."""
    values = [
        (
            s.n, s.t, s.seconds, s.queue, [tuple(m) for m in s.members], s.joined, s.left, tuple(s.slot_steps),
            s.pages_used, s.pages_total, s.preempted, s.blocked_by, [tuple(d) for d in s.drafts],
        )
        for s in steps
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


def digests(policy: str, large: int) -> list[str]:
    """Return the digests of the small workloads and of so many large ones."""
    made = []
    for case in workloads()[: SMALL + large]:
        replay = Replay(policy, case)
        replay.run()
        made.append(digest(replay.steps))
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_have_not_changed(policy: str) -> None:
    large = sample(LARGE)
    assert digests(policy, large) == json.loads(DIGESTS.read_text())[policy].split()[: SMALL + large]


def test_the_workloads_tell_policies_apart() -> None:
    recorded = json.loads(DIGESTS.read_text())
    assert sorted(recorded) == sorted(POLICIES)
    assert all(recorded[policy] == recorded[twin] for policy, twin in SAME.items())
    assert len(set(recorded.values())) == len(recorded) - len(SAME)


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps({policy: " ".join(digests(policy, LARGE)) for policy in POLICIES}, indent=1) + "\n")

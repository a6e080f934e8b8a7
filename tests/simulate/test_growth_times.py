"""The simulator foretells how long requests take in a quarter of the KV pages that they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import policies
from costs.cost import Affine
from costs.mock import MockModel
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import simulate

COST = Affine(base=0.004, token=0.00005, row=0.0002, context=2e-8)
PROMPT, SIZE, SLOTS, COUNT = 40, 16, 16, 32
LENGTHS = [60 + 53 * i % 140 for i in range(COUNT)]
QUARTER = sum(-(-(PROMPT + length) // SIZE) for length in LENGTHS[:SLOTS]) // 4 + 1


def policy() -> Policy:
    made = policies.get_policy("dynamic", SLOTS, {"reserve": "prompt"})
    made.margin = SIZE
    return made


def simulated() -> tuple[float, int]:
    """Return the makespan, and how often a request was preempted."""
    pages = PagePool(QUARTER, SIZE)
    run = simulate(
        Scheduler(policy(), pages), [Sequence([i] * PROMPT, n, id=str(i)) for i, n in enumerate(LENGTHS)], COST
    )
    return run.makespan, sum(seq.preemptions for seq in run.sequences)


def test_a_mock_engine_takes_the_time_that_the_simulator_says() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    mock = MockModel(COST, sleep=sleep, clock=clock)
    made = Scheduler(policy(), PagePool(QUARTER, SIZE))
    sequences = [Sequence([i] * PROMPT, n, id=str(i)) for i, n in enumerate(LENGTHS)]
    for seq in sequences:
        made.add(seq)
    while made.step(mock.forward, clock):
        pass
    makespan, preemptions = simulated()
    assert now[0] == pytest.approx(makespan)
    assert sum(seq.preemptions for seq in sequences) == preemptions > 5

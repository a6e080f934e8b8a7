"""Policies that must take the same steps, and costs that order policies."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from costs.cost import Cost
from costs.steps import Step
from scheduling.iteration import Plan
from simulate.simulator import Run
from tests.support.simulate import COST_A, run_poisson, sequences, uniform


def times(run: Run) -> list[tuple[float, float]]:
    return [(seq.scheduled_at, seq.finished_at) for seq in run.sequences]


@pytest.mark.parametrize(
    ("one", "slots", "options", "other", "other_slots"),
    [
        ("window", 8, {"delay": 0}, "static", 8),
        ("fixed", 1, {}, "nobatch", 1),
        ("static", 1, {}, "nobatch", 1),
        ("chunked", 16, {"max_batched_tokens": 1 << 20}, "dynamic", 16),
    ],
)
def test_two_policies_are_the_same_event_for_event(
    one: str, slots: int, options: dict[str, object], other: str, other_slots: int
) -> None:
    runs = [
        run_poisson(name, n, COST_A, 6.0, uniform(300, rng), rng, **more)
        for name, n, more, rng in (
            (one, slots, options, np.random.default_rng(6)),
            (other, other_slots, {}, np.random.default_rng(6)),
        )
    ]
    assert times(runs[0]) == times(runs[1])


def test_a_window_costs_its_delay_when_hardly_anybody_comes_and_more_when_it_is_longer() -> None:
    means = []
    for delay in (0.0, 0.05, 0.1, 0.4):
        rng = np.random.default_rng(7)
        lengths = uniform(400, rng)
        run = run_poisson("window", 8, COST_A, 0.01, lengths, rng, delay=delay)
        means.append(run.latency.mean())
        assert run.latency.mean() == pytest.approx(delay + (0.007 + 0.0082 * (lengths - 1)).mean(), rel=0.02)
    assert all(a < b for a, b in pairwise(means))


def test_splitting_tokens_evenly_over_steps_is_best_under_a_concave_cost() -> None:
    class Root(Cost):
        def seconds(self, step: Step) -> float:
            return float(np.sqrt(step.tokens))

    def total(*chunks: int) -> float:
        steps = [Plan(1, 0.0, sequences([(0, n, 1)]), [n]) for n in chunks]
        return sum(1 / Root()(plan) * n for plan, n in zip(steps, chunks))

    assert total(512, 512) >= total(256, 768) >= total(1, 1023)

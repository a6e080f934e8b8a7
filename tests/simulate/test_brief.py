"""Runs that keep no requests: the figures of a run that does, and no request longer than it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import policies
from costs.cost import Host
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import result
from simulate.brief import Brief
from simulate.simulator import Run, Simulation
from tests.support.simulate import COST_A, poisson


def requests(count: int) -> list[Sequence]:
    rng = np.random.default_rng(3)
    drawn = poisson(20.0, rng.integers(1, 150, count), rng, prompt=20)
    for seq in drawn:
        seq.deadline = seq.arrived_at + 8
    return drawn


def scheduler(name: str, pages: int | None = None) -> Scheduler:
    options = {"reserve": "prompt"} if pages else {}
    return Scheduler(policies.get_policy(name, 8, options), PagePool(pages, 4) if pages else None)


def figures(run: Run) -> dict[str, Any]:
    return result.result(run, config={})


@pytest.mark.parametrize(
    ("name", "count", "pages"),
    [("dynamic", 1100, None), ("dynamic", 100, 120), ("dynamic+admission-control", 200, None)],
)
def test_the_figures_are_those_of_a_run_that_keeps_its_requests(name: str, count: int, pages: int | None) -> None:
    host = Host(alpha0=0.002, alpha1=0.001, receive=0.0005)
    whole = Simulation(scheduler(name, pages), requests(count), COST_A, host)
    brief = Brief(scheduler(name, pages), iter(requests(count)), COST_A, host)
    whole.run()
    brief.run()
    expected, found = figures(whole.result), figures(brief.result)
    brief.put_into(found)
    told = {key for key in expected if key.partition("_")[2].startswith(("ttft", "tpot", "e2el", "queue"))}
    told |= {key for key in expected if key.endswith("_throughput")}
    told |= {"completed", "failed", "failures", "duration", "num_prompts", "total_input_tokens", "unsent"}
    assert {key: found[key] for key in told} == {key: pytest.approx(expected[key], rel=1e-9) for key in told}
    of_steps = {key: pytest.approx(number, rel=1e-9) for key, number in expected["simulation"].items()}
    assert found["simulation"] == {key: number for key, number in of_steps.items() if key != "deadlines_met"}
    assert bool(expected["simulation"]["preemptions"]) == bool(pages)
    assert bool(expected["failed"]) == ("control" in name)


def test_requests_are_made_when_they_are_about_to_arrive_and_dropped_when_they_have_left() -> None:
    made = 0

    def arrivals() -> Iterator[Sequence]:
        nonlocal made
        for seq in requests(1100):
            made += 1
            yield seq

    class Watched(Brief):
        def add(self, seq: Sequence) -> None:
            super().add(seq)
            assert made - self.requests <= 1000
            assert len(self._inside) == len(self.scheduler.waiting) + len(self.scheduler.running)

    brief = Watched(scheduler("dynamic"), arrivals(), COST_A, Host())
    brief.run()
    assert brief.answered == made == 1100
    assert not brief.result.sequences

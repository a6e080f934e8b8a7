"""A fleet that grows and shrinks: replicas start late, drain before they go, and cost from start to end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from costs import published
from routing import autoscalers
from routing.autoscalers import Bounds, Load
from routing.routers import least_loaded
from simulate import workloads
from simulate.fleet.fleet import Fleet
from simulate.fleet.fleet_run import FleetRun
from simulate.fleet.scaling import ScaledFleet, Scaling
from tests.support.scheduling import make_scheduler
from tests.support.simulate import run_command

COST = published.make("oracle-a")
WAVES = ("fleet", "dynamic", "--arrivals", "onoff:14:60", "--num", "2400", "--replicas", "2..6")


def scaled(scaling: Scaling, rate: float = 30.0, count: int = 2000) -> FleetRun:
    rows = workloads.draw("clipped-normal", rate, count, seed=3)
    fleet = ScaledFleet(lambda: make_scheduler("dynamic", 16), scaling, COST)
    return fleet.run(rows.arriving(), least_loaded(random.Random(1)))


def test_bounds_of_one_number_are_the_fleet_of_that_many() -> None:
    run = scaled(Scaling(autoscalers.make("tokens"), Bounds(3, 3), 30.0))
    rows = workloads.draw("clipped-normal", 30.0, 2000, seed=3)
    plain = Fleet([make_scheduler("dynamic", 16) for _ in range(3)], COST)
    same = plain.run(rows.arriving(), least_loaded(random.Random(1)))
    assert (run.latency == same.latency).all()
    assert run.replica_seconds == same.replica_seconds == 3 * (run.ended - run.began)


def test_a_replica_takes_requests_only_after_its_start_up_and_costs_from_the_decision() -> None:
    run = scaled(Scaling(lambda replicas, bounds: min(len(replicas) + 1, bounds.most), Bounds(1, 2), 20.0))
    late = run.arrival[run.where == 1]
    assert late.min() >= run.began + 20.0
    assert run.history[:2] == [(run.began, 1, 1, 0), (run.began + 20.0, 2, 0, 0)]
    assert run.replica_seconds == pytest.approx(2 * (run.ended - run.began))


def test_the_busiest_replica_is_told_by_no_more_replicas_than_there_were_at_once() -> None:
    calls = itertools.count()

    def flaps(replicas: Sequence[Load], bounds: Bounds) -> int:
        return bounds.most if next(calls) // 5 % 2 else bounds.least

    run = scaled(Scaling(flaps, Bounds(1, 4), 1.0, down=0.0))
    assert len(set(run.where)) > 4
    assert run.replicas == 4
    assert run.busiest == pytest.approx(max(np.bincount(run.where)) / (run.requests / 4))


def test_a_replica_that_is_stopped_answers_what_it_has() -> None:
    class Once:
        """Want the most at first, and later the least."""

        calls = 0

        def __call__(self, replicas: Sequence[Load], bounds: Bounds) -> int:
            self.calls += 1
            return bounds.most if self.calls < 30 else bounds.least

    run = scaled(Scaling(Once(), Bounds(1, 4), 5.0, down=0.0))
    assert run.answered == run.requests == 2000
    assert any(draining for *_, draining in run.history)
    stopped = run.began + 29
    assert len(set(run.where[run.arrival > stopped].tolist())) == 1
    assert run.replica_seconds < 4 * (run.ended - run.began)


def test_more_load_brings_replicas_and_less_takes_them_away(capsys: pytest.CaptureFixture[str]) -> None:
    told, words = run_command(capsys, *WAVES, "--autoscaler", "fixed", "--autoscaler", "tokens", "--startup", "10",
                              "--downscale-delay", "20", "--max-batch-size", "8")  # fmt: skip
    fixed, tokens = told["routers"]
    ready = [entry[1] for entry in tokens["history"]]
    assert max(ready) >= 4
    assert min(ready[ready.index(max(ready)) :]) < max(ready)
    assert tokens["replica_hours"] < 0.9 * fixed["replica_hours"]
    assert 0.5 < tokens["slo"] <= fixed["slo"]
    assert all(len(line) <= 80 for line in words.splitlines() if line[:1] in "┃│┏┡└")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--replicas 2..8", "requires an autoscaler"),
        ("--replicas 8..2", "2..8"),
        ("--replicas 8 --autoscaler tokens", "no effect on 8 replicas"),
        ("--replicas 2..8 --autoscaler token", "Use one of: fixed, requests, tokens"),
        ("--replicas 2..8 --autoscaler tokens:3", "tokens:0.5"),
        ("--startup 3", "Use --autoscaler"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(more: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = run_command(capsys, "fleet", "dynamic", "--num", "20", *more.split(), code=2)
    assert named in words

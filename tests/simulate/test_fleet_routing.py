"""What routers of a simulated fleet know and what the result says of them, and steps of equal length at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import policies
from costs.cost import Host
from costs.published import Constant
from costs.steps import Step
from routing import bodies
from routing.routers import Replicas, RoutingKey
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.commands.fleet import asking
from simulate.fleet.fleet import Fleet
from simulate.stretch import step_ends


class Lengthening(Constant):
    """The same times, of a cost that promises nothing about longer rows."""

    flat = False

    def seconds(self, step: Step) -> float:
        return super().seconds(step)


def schedulers(count: int) -> list[Scheduler]:
    return [Scheduler(policies.get_policy("dynamic", max_batch_size=4)) for _ in range(count)]


def test_a_router_knows_of_a_text_what_the_ingress_knows_of_it() -> None:
    rows = workloads.draw("shared-prefix:2:120", 5.0, 6)
    assert rows.texts is not None
    seen: list[RoutingKey] = []

    def route(replicas: Replicas, key: RoutingKey) -> Iterator[int]:
        seen.append(key)
        return iter([0])

    Fleet(schedulers(2), Constant()).run(rows.arriving(), route, asking(rows))
    body = [bodies.routing_key({"prompt": text, "user": user}, "") for text, user in zip(rows.texts, rows.client or [])]
    assert seen == body
    assert len(seen[0].blocks) > 1


def test_the_busiest_replica_is_told_by_the_mean() -> None:
    turns = iter([0, 0, 0, 1])
    sequences = [Sequence([1], 1, id=str(i), arrived_at=float(i)) for i in range(4)]
    run = Fleet(schedulers(2), Constant()).run(sequences, lambda replicas, key: iter([next(turns)]))
    assert run.busiest == pytest.approx(1.5)
    idle = Fleet(schedulers(2), Constant()).run(
        [Sequence([1], 1, id="0", arrived_at=0.0)], lambda replicas, key: iter([0])
    )
    assert idle.busiest == 2  # the mean counts a replica that got no request


@pytest.mark.parametrize("until", [float("inf"), 0.0, 1.0, 1.3, 1.30001, 2.0, 50.0])
@pytest.mark.parametrize("seconds", [0.1, 1 / 3, 0.0])
def test_steps_of_equal_length_end_when_they_would_one_by_one(seconds: float, until: float) -> None:
    members = [Sequence([1] * 5, 900, output_ids=[1]) for _ in range(3)]
    for seq in members:
        seq.computed = 5
    plan = Plan(1, 0.0, members, [1] * 3)
    host = Host(sigma=0.01 if seconds else 0.0)
    spent = Constant(seconds, 0.0)(plan) + host.seconds(3)
    expected = step_ends(Lengthening(seconds, 0.0), host, plan, spent, 1.0, 300, until)
    assert step_ends(Constant(seconds, 0.0), host, plan, spent, 1.0, 300, until) == expected

"""Capacity and fleets against what queueing theory knows."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import policies
from costs import published
from costs.cost import Cost, Host, Phases
from costs.published import Constant
from routing.routers import ROUTERS, least_loaded, round_robin
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.fleet import plan
from simulate.fleet.fleet import Fleet
from simulate.fleet.plan import Capacity, Limit, capacity, parse_limit
from simulate.rows import Rows
from simulate.scenario import Chosen, EngineSize, Scenario
from simulate.simulator import PolicyHangs, simulate
from tests.support import points, sample
from tests.support.scheduling import make_scheduler
from tests.support.simulate import agrees, replicate, run_poisson

MS = Phases(token=1e-3)  # a prompt of n tokens and one token out: a job of n ms


def jobs(n: int, mean_ms: float | None, seed: int = 0) -> Rows:
    """Return jobs at one a second, of 1 s each, or exponential with that mean."""
    rng = np.random.default_rng(seed)
    size = np.full(n, 1000) if mean_ms is None else np.ceil(rng.exponential(mean_ms, n)).astype(int)
    return Rows(np.cumsum(rng.exponential(1.0, n)), size, np.ones(n, int))


def nobatch() -> Scheduler:
    return make_scheduler("nobatch", 1)


def alone(unit: Rows, cost: Cost = MS, policy: str = "nobatch", slots: int = 1) -> tuple[Scenario[Rows], Chosen]:
    """Return a scenario of one policy without a limit to the tokens of a step, and this policy."""
    chosen = Chosen(policy)
    return Scenario((chosen,), EngineSize(slots, 1 << 30), cost, Host(), unit), chosen


@pytest.mark.full
def test_the_capacity_of_m_m_1_under_a_p99_limit() -> None:
    found = capacity(*alone(jobs(8000, 1000.0, 3)), [Limit("e2el", "p99", 10.0)])
    assert found.low == pytest.approx(0.5395, rel=0.08)
    assert found.binds == "p99 e2el <= 10 s"
    assert found.low < found.high <= found.low / 0.97


def test_a_hundred_requests_a_second_need_186_such_servers() -> None:
    assert Capacity(1 - np.log(100) / 10, 1.0, "").replicas(100) == 186


@pytest.mark.full
def test_the_capacity_of_m_d_1_under_a_mean_limit() -> None:
    found = capacity(*alone(jobs(6000, None, 1)), [Limit("e2el", "mean", 3.0)])
    assert found.low == pytest.approx(0.8, rel=0.05)


def test_one_queue_before_eight_servers_is_erlang_c() -> None:
    """Eight slots whose step does not grow with the batch are eight servers: P(wait) .45764, E[T] 1.28603 s."""
    latencies = []

    def one(rng: np.random.Generator) -> float:
        lengths = rng.geometric(1 / 50, sample(4000))
        run = run_poisson("dynamic", 8, Constant(0.02, 0.0), 6.4, lengths, rng)
        latencies.append(run.latency.mean())
        return float((run.waiting > 0.02).mean())

    wait, error = replicate(one, 3)
    assert abs(wait - 0.45764) < max(4 * error, 0.03)
    assert np.mean(latencies) == pytest.approx(1.28603, rel=0.05)


@pytest.mark.full
def test_a_stricter_limit_never_raises_capacity() -> None:
    unit = workloads.draw("clipped-normal", 1.0, 300, seed=2)
    cost = published.make("oracle-a")
    found = [
        capacity(*alone(unit, cost, "dynamic", 16), [Limit("ttft", "p99", bound)]).low
        for bound in (0.02, 0.1, 0.5, 2.0)
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_queue_that_grows_fails_whatever_its_percentiles_say() -> None:
    unit = jobs(sample(3000), None, 5)
    growing = simulate(nobatch(), unit.faster(1.2).sequences(), MS)
    steady = simulate(nobatch(), unit.faster(0.7).sequences(), MS)
    assert plan.queue_grows(growing.arrival, growing.latency)
    assert not plan.queue_grows(steady.arrival, steady.latency)
    assert plan.breaks(growing, []) == "the queue grows"
    assert plan.breaks(steady, []) == ""
    assert capacity(*alone(unit), []).low == pytest.approx(1.0, rel=0.08)


def test_a_queue_of_programs_is_judged_while_programs_begin() -> None:
    scenario, chosen = alone(workloads.draw("agents", 1.0, 60, seed=0), published.make("oracle-a"), "dynamic", 4)
    for rate, broken in ((0.1, ""), (4.0, "the queue grows"), (8.0, "the queue grows")):
        run = replace(scenario, rows=scenario.rows.faster(rate)).serve(chosen)
        assert plan.breaks(run, []) == broken


def test_a_limit_that_nobody_meets_gives_no_capacity() -> None:
    found = capacity(*alone(jobs(300, None)), [Limit("e2el", "mean", 0.5)])
    assert found.low == 0
    assert found.binds == "mean e2el <= 0.5 s"
    assert found.replicas(10) == 0


@pytest.mark.parametrize("text", ["p99:ttft:1", "mean:e2el:0.5", "p99.9:itl:0.1", "p50:norm:0.2"])
def test_limits_are_read(text: str) -> None:
    limit = parse_limit(text)
    assert f"{limit.statistic}:{limit.measure}:{limit.bound:g}" == text


def test_the_normalized_latency_is_that_of_a_token() -> None:
    rows = Rows(np.zeros(2), np.ones(2, int), np.array([2, 4]))
    scenario, chosen = alone(rows, Constant(a=1.0, b=0.0))
    run = scenario.serve(chosen)  # one after the other: 2 s for 2 tokens, 6 s for 4
    assert Limit("norm", "mean", 1.0).value(run, 0) == pytest.approx((2 / 2 + 6 / 4) / 2)


@pytest.mark.parametrize("text", ["ttft:1", "p99:tft:1", "p101:ttft:1", "p99:ttft:-1", "p99:ttft:x"])
def test_a_limit_that_makes_no_sense_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="Use statistic:measure:seconds, as in p99:ttft:1"):
        parse_limit(text)


@pytest.mark.parametrize("host", [Host(), Host(0.003, 0.002, 0.0001, 0.001, 0.01)], ids=["", "host"])
@pytest.mark.parametrize("arrivals", ["poisson", "burst"])
@pytest.mark.parametrize("policy", points(2, "static", "impatient", "nobatch", "dynamic", "window", "fixed"))
def test_a_fleet_of_one_is_the_simulator(policy: str, arrivals: str, host: Host) -> None:
    cost = published.make("oracle-a")
    rows = workloads.draw("clipped-normal", 1.5, 80, seed=4, arrivals=arrivals)
    run = simulate(make_scheduler(policy, 8), rows.sequences(), cost, host)
    for name, router in ROUTERS.items():
        alone = Fleet([make_scheduler(policy, 8)], cost, host).run(rows.sequences(), router(random.Random(0)))
        assert (alone.latency == run.latency).all(), name
        assert (alone.ttft == run.ttft).all()
        assert (alone.waiting == run.waiting).all()
        assert sorted(alone.gaps) == pytest.approx(sorted(run.gaps), abs=1e-9)
        assert (alone.makespan, alone.steps, alone.batches) == (run.makespan, run.steps, run.batches)


@pytest.mark.parametrize("policy", ["dynamic", "impatient", "dynamic+rpm"])
def test_a_replica_that_has_answered_everything_has_no_load(policy: str) -> None:
    rows = workloads.draw("original", 40.0, 300, seed=1)
    served = Fleet([make_scheduler(policy, 8) for _ in range(3)], published.make("oracle-a"))
    served.run(rows.sequences(), least_loaded(random.Random(0)))
    assert served.pool.load == [0, 0, 0]


def test_a_policy_that_hangs_in_a_fleet_is_named() -> None:
    class Never(Policy):
        def admit(self, *_: object) -> int:
            return 0

    rows = workloads.draw("original", 2.0, 5)
    with pytest.raises(PolicyHangs, match="Return a time from deadline"):
        Fleet([Scheduler(Never(4))], MS).run(rows.sequences(), round_robin(random.Random(0)))


def mean_of(router: str, replicas: int, seed: int) -> float:
    unit = jobs(2500 * replicas // 4, 1000.0, seed)
    run = Fleet([nobatch() for _ in range(replicas)], MS).run(
        unit.faster(0.8 * replicas).sequences(), ROUTERS[router](random.Random(0))
    )
    return float(run.latency.mean())


@pytest.mark.full
def test_routers_that_know_more_wait_less() -> None:
    """At 0.8 of eight servers: random is M/M/1 (5 s), and one queue for all (1.286 s) is the bound of the rest."""
    means = {
        name: np.mean([mean_of(name, 8, seed) for seed in range(2)])
        for name in ("random", "round-robin", "power-of-two", "least-loaded")
    }
    assert means["random"] == pytest.approx(5.0, rel=0.25)
    assert means["random"] > means["round-robin"] > means["power-of-two"] > means["least-loaded"] > 1.286


@pytest.mark.full
def test_a_random_split_leaves_each_replica_a_queue_of_its_own() -> None:
    found = replicate(lambda rng: mean_of("random", 16, int(rng.integers(1 << 30))), 3)
    assert agrees(found, 5.0) or found[0] == pytest.approx(5.0, rel=0.12)


def test_a_prefix_aware_router_finds_more_in_the_caches() -> None:
    def hits(router: str) -> float:
        rng = np.random.default_rng(0)
        trace = []
        for i, at in enumerate(np.cumsum(rng.exponential(0.05, 600))):
            system = int(rng.integers(40))
            prompt = [1000 + system] * 64 + rng.integers(0, 900, 16).tolist()
            trace.append(Sequence(prompt, 8, id=str(i), arrived_at=float(at)))
        schedulers = [Scheduler(policies.get_policy("dynamic", max_batch_size=16), PagePool(60, 16)) for _ in range(8)]
        return Fleet(schedulers, published.make("oracle-a")).run(trace, ROUTERS[router](random.Random(0))).hit_rate

    aware, blind = hits("prefix-aware"), hits("least-loaded")
    assert aware > blind + 0.2
    assert aware > 0.6


@pytest.mark.full
def test_a_thousand_replicas_take_seconds() -> None:
    rows = workloads.draw("original", 3000.0, 6000, seed=1)
    schedulers = [make_scheduler("dynamic", 32) for _ in range(1000)]
    run = Fleet(schedulers, Constant()).run(rows.sequences(), ROUTERS["power-of-two"](random.Random(0)))
    assert len(set(run.where.tolist())) > 900
    assert all(seq.finish_reason == "length" for seq in run.sequences)

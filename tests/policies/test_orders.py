"""Orders by length, priority, deadline, prefix and level."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given

import policies
from policies.orders._predictions import chance, gauss
from scheduling.pages import PagePool
from scheduling.sequence import Sequence
from tests.support import points
from tests.support.scheduling import Request, Run, drive, make_scheduler, order_of_admission, requests
from tests.support.strategies import Pool, pools, slots, traces

EVERY = policies.order_names()
UNGUARDED: dict[str, object] = {"guard": 1e9, "guard_ratio": 1e9}


def many(n: int, seed: int, gap: float = 0, longest: int = 128) -> list[Sequence]:
    """Return n requests of random lengths whose arrivals are `gap` apart in the mean."""
    rng = random.Random(seed)
    now, sequences = 0, []
    for i in range(n):
        now += round(rng.expovariate(1 / gap)) if gap else 0
        sequences.append(Sequence([1], rng.randint(1, longest), id=f"r{i}", arrived_at=now))
    return sequences


def mean_latency(run: Run) -> float:
    return sum(s.finished_at - s.arrived_at for s in run.sequences) / len(run.sequences)


# One order serves requests that are too late after those that are not.
@pytest.mark.parametrize("order", [order for order in EVERY if order != "just-in-time"])
@given(traces(), slots, pools())
def test_with_equal_requests_of_one_client_every_order_is_first_come_first_served(
    order: str, trace: list[Request], slots: int, pool: Pool
) -> None:
    alike = [(arrival, [0, 0], 3) for arrival, _, _ in trace]
    exact: dict[str, object] = {"predictor": "oracle"} if order == "ssjf" else {}
    run = drive(make_scheduler(f"dynamic+{order}", slots, pool(), **exact), requests(*alike))
    if not any(s.preemptions for s in run.sequences):
        assert order_of_admission(run) == [s.id for s in run.sequences]


@pytest.mark.parametrize("order", [o for o in EVERY if o not in ("srpt", "mlfq", "admission-control")])
def test_one_server_does_the_same_work_in_any_order(order: str) -> None:
    """The sum of service x wait is the same for every order that conserves work and preempts nobody."""
    sums = set()
    for name in (f"nobatch+{order}", "nobatch"):
        sequences = many(15, seed=3, gap=500)
        for i, seq in enumerate(sequences):
            seq.client, seq.priority, seq.deadline = "ab"[i % 2], i % 3, 100.0 * (i * 7 % 11)
        run = drive(make_scheduler(name, 1), sequences)
        spans = [(s.finished_at - s.scheduled_at, s.scheduled_at - s.arrived_at) for s in sequences]
        sums.add(sum(service * wait for service, wait in spans))
        assert run.now == max(s.finished_at for s in sequences)
    assert len(sums) == 1


def test_shortest_first_saves_the_gini_coefficient_of_a_bursts_wait() -> None:
    waits = {}
    for name, options in (("nobatch", {}), ("nobatch+sjf", UNGUARDED)):
        sequences = many(80, seed=1)
        drive(make_scheduler(name, 1, **options), sequences)
        waits[name] = sum(s.scheduled_at for s in sequences)
    services = sorted(s.finished_at - s.scheduled_at for s in sequences)
    n = len(services)
    gini = sum((2 * i - n + 1) * s for i, s in enumerate(services)) / (n * sum(services))
    fcfs = (n - 1) / 2 * sum(services)  # the mean over all orders
    assert waits["nobatch+sjf"] == pytest.approx(fcfs * (1 - gini * n / (n - 1)))
    assert waits["nobatch+sjf"] < waits["nobatch"]


@pytest.mark.full
def test_better_predictions_wait_less() -> None:
    def wait(**options: object) -> float:
        sequences = many(150, seed=2)
        drive(make_scheduler("nobatch+sjf", 1, **UNGUARDED, **options), sequences)
        return sum(s.scheduled_at for s in sequences)

    classes = {"predictor": "classes"}
    waits = [wait(), wait(**classes, classes=4), wait(**classes), wait(**classes, accuracy=0.8), wait(predictor="mean")]
    assert waits == sorted(waits)
    assert wait() < wait(predictor="noisy", sigma=0.5) < wait(predictor="noisy", sigma=3)


@pytest.mark.full
def test_without_error_every_predictor_is_the_oracle() -> None:
    def admitted(**options: object) -> list[str]:
        return order_of_admission(drive(make_scheduler("nobatch+sjf", 1, **options), many(50, seed=4)))

    assert admitted() == admitted(predictor="noisy", sigma=0)
    assert admitted() == admitted(predictor="uniform", error=0)
    assert admitted() == admitted(predictor="classes", classes=128)


def test_a_uniform_error_is_drawn_evenly_and_never_larger_than_it_says() -> None:
    policy = policies.get_policy("dynamic+sjf", 4, {"predictor": "uniform", "error": "0.25"})
    errors = [policy.predict(s) / s.max_tokens - 1 for s in many(3000, seed=8)]  # type: ignore[attr-defined]
    assert -0.25 < min(errors) < -0.24
    assert 0.24 < max(errors) < 0.25
    assert sum(errors) / 3000 == pytest.approx(0, abs=0.01)
    assert sum(e * e for e in errors) / 3000 == pytest.approx(0.25**2 / 3, rel=0.05)


def test_chance_in_predictions_belongs_to_seed_and_id() -> None:
    drawn = [chance(0, f"r{i}") for i in range(2000)]
    normal = [gauss(0, f"r{i}") for i in range(2000)]
    assert drawn == [chance(0, f"r{i}") for i in range(2000)]
    assert drawn != [chance(1, f"r{i}") for i in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.5, abs=0.03)
    assert sum(normal) / 2000 == pytest.approx(0, abs=0.1)
    assert sum(x * x for x in normal) / 2000 == pytest.approx(1, abs=0.12)


def test_four_in_five_are_put_into_the_right_one_of_two_classes() -> None:
    policy = policies.get_policy("static+sjf", 4, {"predictor": "classes", "accuracy": "0.8"})
    right = [
        (policy.predict(s) > 64) == (s.max_tokens > 64)  # type: ignore[attr-defined]
        for s in many(3000, seed=5)
    ]
    assert sum(right) / 3000 == pytest.approx(0.8, abs=0.03)


def test_a_mean_is_of_the_clients_own_last_answers() -> None:
    policy = policies.get_policy("dynamic+sjf", 4, {"predictor": "mean", "recent": "2"})
    for i, tokens in enumerate([90, 10, 20]):
        seq = Sequence([1], 100, id=f"a{i}", client="a")
        seq.output_ids = [0] * tokens
        policy.on_finish(seq, 1.0)
    for client, mean in (("a", 15), ("b", 15)):
        assert policy.predict(Sequence([1], 100, client=client)) == mean  # type: ignore[attr-defined]


def test_the_guard_lets_no_long_request_wait_much_longer_than_it_says() -> None:
    def longest_wait(**options: object) -> int:
        trace = [(0, 1, 4), (1, 1, 100), *((2 + 20 * i, 1, 2) for i in range(300))]
        run = drive(make_scheduler("nobatch+sjf", 1, **options), requests(*trace))
        return run.sequences[1].scheduled_at - 1

    assert longest_wait(**UNGUARDED) > 5000
    assert longest_wait(guard=500, guard_ratio=1e9) <= 500 + 13 + 12
    assert longest_wait(guard=1e9, guard_ratio=0.5) < 1500


def test_a_higher_class_waits_less_and_ageing_lifts_the_lower() -> None:
    def waits(**options: object) -> list[float]:
        sequences = many(300, seed=6, gap=280, longest=40)
        for i, seq in enumerate(sequences):
            seq.priority = i % 3
        drive(make_scheduler("nobatch+priority", 1, **options), sequences)
        return [sum(s.scheduled_at - s.arrived_at for s in sequences[k::3]) for k in range(3)]

    strict, aged, fcfs = waits(), waits(aging=3000), waits(aging=1e-9)
    assert strict[0] < strict[1] < strict[2]
    assert strict[0] < aged[0] < aged[2] < strict[2]
    assert max(fcfs) < 1.3 * min(fcfs)


@pytest.mark.full
def test_by_deadline_more_are_in_time_than_by_arrival() -> None:
    def in_time(name: str) -> int:
        sequences = many(200, seed=7, gap=700)
        for i, seq in enumerate(sequences):
            seq.deadline = seq.arrived_at + (1500 if i % 2 else 30_000)
        drive(make_scheduler(name, 1), sequences)
        return sum(s.finished_at <= s.deadline for s in sequences)

    assert in_time("nobatch+edf") > 1.3 * in_time("nobatch")


def test_a_request_without_a_deadline_gets_the_default_one() -> None:
    trace = [(0, 1, 1), (1, 1, 9), (2, 1, 1)]
    run = drive(make_scheduler("nobatch+edf", 1, slo=5, slo_per_token=10), requests(*trace))
    assert order_of_admission(run) == ["r0", "r2", "r1"]


def test_longest_prefix_first_hits_more_of_the_cache() -> None:
    def hits(name: str, **options: object) -> int:
        prompts = [[k] * 8 + [100 + i] for i in range(6) for k in range(4)]
        pool = PagePool(8, 4)
        drive(make_scheduler(name, 1, pool, **options), requests(*((0, p, 2) for p in prompts)))
        return pool.hit_tokens

    assert hits("dynamic+lpm") > 2 * hits("dynamic")
    assert hits("dynamic+lpm", most=3) < hits("dynamic+lpm")
    assert hits("dynamic+lpm", guard=50) < hits("dynamic+lpm")


@pytest.mark.parametrize("seed", points(2, *range(4)))
def test_least_remaining_first_is_no_slower_than_first_come_with_exact_predictions(seed: int) -> None:
    fcfs = drive(make_scheduler("dynamic", 4), many(200, seed, gap=300))
    srpt = drive(make_scheduler("dynamic+srpt", 4), many(200, seed, gap=300))
    assert any(s.preemptions for s in srpt.sequences)
    assert mean_latency(srpt) < mean_latency(fcfs)


def test_a_request_that_is_nearly_done_is_not_preempted() -> None:
    def preemptions(c: float, shorts: int) -> int:
        trace = [(0, 1, 20), (shorts, 1, 2)]
        return drive(make_scheduler("dynamic+srpt", 1, c=c), requests(*trace)).sequences[0].preemptions

    # by 100 the long one has 8 of its 20 tokens
    assert [preemptions(c, 100) for c in (0, 0.3, 0.5, 1)] == [0, 0, 1, 1]


def test_recomputed_tokens_are_in_the_record() -> None:
    run = drive(make_scheduler("dynamic+srpt", 1), requests((0, 3, 9), (40, 3, 2)))
    long = run.sequences[0]
    assert (long.preemptions, long.recompute_until) == (1, 6)
    assert [it.preempted for it in run.iterations if it.preempted] == [["r0"]]
    again = [it for it in run.iterations if it.slot_steps.recomputed]
    assert [it.slot_steps.recomputed for it in again] == [pytest.approx(6 / 7)]
    assert long.output_ids == list(range(9))


def heavy_tail(seed: int) -> list[Sequence]:
    sequences = many(200, seed, gap=100, longest=12)
    for seq in sequences[::10]:
        seq.max_tokens = 150
    return sequences


@pytest.mark.parametrize("seed", points(1, *range(3)))
def test_levels_help_when_lengths_are_unknown_and_heavy_tailed(seed: int) -> None:
    fcfs = drive(make_scheduler("dynamic", 2), heavy_tail(seed))
    mlfq = drive(make_scheduler("dynamic+mlfq", 2, quantum=200, prompt_pace=0), heavy_tail(seed))
    assert mean_latency(mlfq) < mean_latency(fcfs)


def test_a_long_prompt_skips_the_levels_that_it_could_not_finish_in() -> None:
    policy = policies.get_policy("dynamic+mlfq", 4, {"quantum": "10", "prompt_pace": "1"})
    sequences = requests(*((0, length, 1) for length in (3, 10, 11, 20, 21, 100)))
    assert [policy._level_of(s) for s in sequences] == [0, 0, 1, 1, 2, 4]  # type: ignore[attr-defined]


def test_a_request_that_waited_too_long_is_lifted_to_the_top() -> None:
    def wait(**options: object) -> int:
        trace = [(0, 1, 8), *((10 * i, 1, 1) for i in range(1, 200))]
        loop = make_scheduler("dynamic+mlfq", 1, quantum=60, prompt_pace=0, **options)
        return drive(loop, requests(*trace)).sequences[0].finished_at

    assert 5 * wait(lift_every=5, starving=100) < wait(lift_every=10**6)


def test_every_order_goes_with_every_loop() -> None:
    """Two clients, a cancelled one, little room: no name of a loop's is an order's by accident."""
    for loop, order in itertools.product(policies.names(), EVERY):
        sequences = [
            Sequence([1] * (1 + i % 4), 1 + i % 3, id=f"r{i}", client="ab"[i % 2], arrived_at=9 * (i // 3))
            for i in range(12)
        ]
        for seq in sequences[::3]:
            seq.open_ended = True
        pool = PagePool(9, 2)
        drive(make_scheduler(f"{loop}+{order}", 3, pool), sequences, cancel={2: [0], 4: [1]})


def test_a_preempted_request_does_not_overtake_an_overdue_one() -> None:
    policy = policies.get_policy("dynamic+sjf", 2, {"guard": 10.0})
    old, young = Sequence([1], 90, id="old", arrived_at=0.0), Sequence([1], 3, id="young", arrived_at=4.0)
    preempted = Sequence([1], 50, id="preempted", arrived_at=5.0)
    for seq in (old, young, preempted):
        policy.on_arrival(seq, seq.arrived_at)
    policy.on_admit(preempted, 5.0)
    preempted.preempt()
    policy.on_preempt(preempted, 12.0)
    # The queue has what was preempted before all others.
    assert [seq.id for seq in policy.order([preempted, old, young], 12.0)] == ["old", "young", "preempted"]

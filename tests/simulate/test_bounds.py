"""Lower bounds: never above what is possible, and near it."""

from __future__ import annotations

import random
import statistics
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

import policies
from costs.cost import Affine, Cost, Host, Phases, Scaled
from costs.published import MODELS
from costs.steps import decoding, prefilling
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.best import regret
from simulate.best.bounds import Jobs, bounds, misses
from simulate.best.clairvoyant import KnownHits, parts
from simulate.best.optimum import Optimum
from simulate.simulator import simulate
from tests.support.simulate import run_command

LINEAR = [
    Affine(base=8, token=1, row=1),
    Affine(base=2, token=1, row=0.2, prefill=1, context=0.05, pair=0.01),
    Phases(base=8, row=0.2, start=5, request=2),
    Phases(base=8, row=0.1, token=0.1),
    MODELS["constant"],
]
OTHERS = [
    Affine(base=4, token=0.5, hinge=2, knee=3),
    Affine(base=2, prompt=1, prefill=2, hinge=2, knee=6),
    Affine(base=3, decode=1, prompt=0.2, start=0.5, context=0.02, experts=9, chosen=0.3),
    Affine(base=3, decode=1, prompt=0.2, hinge=1, knee=4, experts=4, chosen=0.1),
    Affine(base=2, decode=1.5, prompt=0.5, prefill=0.1, experts=2, chosen=0.5, buckets=(2, 4)),
    Phases(base=1, row=1, start=2, token=0.3, request=0.1, square=0.01, context=0.02, knee=1),
    Scaled(Affine(base=3.6e-4, hinge=2.3e-6, knee=156, context=4.9e-8, pair=4.9e-8), 3.0),
    *(MODELS[name] for name in ("distserve-opt13b", "splitwise", "llm-mock", "ssjf")),
]


@pytest.fixture(autouse=True)
def regret_in_one_figure() -> None:
    """Split the regret, which other tests do not."""


def requests(rng: random.Random, cost: Cost, most: int, longest: int = 3) -> list[Sequence]:
    """Return a few short requests whose arrivals are close enough for them to meet."""
    spread = rng.choice([0, 2, 6]) * cost.seconds(decoding(1, 2, 2))
    return [
        Sequence([0] * rng.randint(1, 6), rng.randint(1, longest), id=str(i), arrived_at=rng.random() * spread)
        for i in range(rng.randint(1, most))
    ]


class Misses(Optimum):
    """The search for the fewest requests that end after their deadlines; requests differ by these as by weights."""

    def fewest(self, deadlines: list[float]) -> int:
        self._deadlines = deadlines
        return round(self._least(deadlines))

    def _price(self, j: int, end: float) -> float:
        return float(end > self._deadlines[j] + 1e-9)

    def _least_rest(self, done: tuple[int, ...], waiting: list[int], now: float) -> float:
        return sum(self._price(j, max(now, self.arrival[j]) + self._rest[j][done[j]][1]) for j in waiting)


def gaps(number: int, laws: list[Cost], most: int) -> dict[str, list[float]]:
    """Return bound over optimum for random requests, never more than 1, by what is bounded."""
    rng = random.Random(1)
    shares: dict[str, list[float]] = {"mean": [], "per token": [], "makespan": []}
    for _ in range(number):
        cost, slots = rng.choice(laws), rng.randint(1, 3)
        few = requests(rng, cost, most)
        due = [seq.arrived_at + rng.uniform(1, 12) * cost.seconds(decoding(1, 2, 2)) for seq in few]
        for seq, deadline in zip(few, due):
            seq.deadline = deadline
        least, best = bounds(few, cost, slots), Optimum(few, cost, slots)
        shares["mean"].append(least.mean_latency / best.least_mean())
        shares["per token"].append(least.weighted_latency / best.least_weighted([1 / seq.max_tokens for seq in few]))
        shares["makespan"].append(least.makespan / best.least_makespan())
        assert (least.misses or 0) <= Misses(few, cost, slots).fewest(due), (cost, slots, few)
        assert max(share[-1] for share in shares.values()) <= 1 + 1e-9, (cost, slots, few)
    return shares


def medians(shares: dict[str, list[float]]) -> list[float]:
    return [statistics.median(share) for share in shares.values()]


def test_bounds_stay_below_the_optimum_and_within_a_twentieth_of_it() -> None:
    assert min(medians(gaps(80, LINEAR, 4))) > 0.95


def test_bounds_of_laws_with_knees_and_tables_stay_below_the_optimum_too() -> None:
    assert min(medians(gaps(60, OTHERS, 4))) > 0.8


@pytest.mark.full
def test_bounds_of_seven_requests_stay_below_the_optimum() -> None:
    mean, per_token, makespan = medians(gaps(2000, LINEAR, 7))
    assert mean > 0.95
    assert per_token > 0.92
    assert makespan > 0.95
    assert min(medians(gaps(500, OTHERS, 7))) > 0.8


@pytest.mark.parametrize("cost", [*LINEAR, *OTHERS], ids=lambda cost: cost.name)
def test_no_policy_beats_the_bounds(cost: Cost) -> None:
    for host, (most, cached) in product((Host(), Host(0.2, 0.1, 0.01, 0.05)), ((8, False), (40, True))):
        least = bounds(with_deadlines(cost, most), cost, 3, host, page_size=2 if cached else 0)
        for name in ("nobatch", "static", "dynamic", "chunked", "dynamic+srpt", "prefill-first"):
            many, pool = with_deadlines(cost, most), PagePool(400, 2) if cached else None
            run = simulate(Scheduler(policies.get_policy(name, max_batch_size=3), pool, 16), many, cost, host)
            assert least.mean_latency <= run.latency.mean() * (1 + 1e-9)
            assert least.makespan <= run.makespan * (1 + 1e-9)
            late = sum((seq.finished_at or 0.0) + host.alpha1 > (seq.deadline or 0.0) for seq in many)
            assert (least.misses or 0) <= late


def with_deadlines(cost: Cost, most: int) -> list[Sequence]:
    """Return the same requests with deadlines and hashes each time."""
    rng, pool = random.Random(most), PagePool(400, 2)
    many = requests(rng, cost, most, longest=12)
    for seq in many:
        seq.deadline = seq.arrived_at + rng.uniform(1, 30) * cost.seconds(decoding(1, 2, 2))
        seq.hashes = pool.hashes(seq.prompt_ids)
    return many


class NewestFirst(Policy):
    """Computes a few tokens a step, of the request that joined last, so that it interrupts long prompts."""

    def allocate_tokens(self, running: list[Sequence], token_budget: int) -> list[int]:
        unfinished = [seq for seq in running if not seq.is_finished]
        return [min(seq.pending, token_budget) if seq is unfinished[-1] else 0 for seq in running]


def test_a_policy_that_cuts_prompts_does_not_beat_the_bounds() -> None:
    cost, rng = Affine(base=0.5, token=1), random.Random(2)
    for tokens in (1, 4, 9):
        for _ in range(20):
            few = [
                Sequence([0] * rng.choice((1, 40)), rng.randint(1, 2), id=str(i), arrived_at=rng.random() * 60)
                for i in range(3)
            ]
            run = simulate(Scheduler(NewestFirst(max_batch_size=3), None, tokens), few, cost)
            assert bounds(few, cost, 3).mean_latency <= run.latency.mean() * (1 + 1e-9)


def test_a_request_waits_for_the_end_of_the_other_ones_step_or_makes_it_wait() -> None:
    cost = Affine(base=8, token=1)
    pair = [Sequence([0], 2), Sequence([0], 1, arrived_at=4.0)]
    assert bounds(pair, cost, 2).mean_latency == pytest.approx(Optimum(pair, cost, 2).least_mean())


def test_the_bound_of_a_request_alone_is_its_time_alone() -> None:
    cost = LINEAR[1]
    alone = cost.seconds(prefilling(5)) + cost.seconds(decoding(1, 6)) + cost.seconds(decoding(1, 7))
    least = bounds([Sequence([0] * 5, 3, arrived_at=4.0)], cost, 8)
    assert least.mean_latency == pytest.approx(alone)
    assert least.makespan == pytest.approx(alone)


def test_shortest_first_attains_the_bound_of_a_burst_without_batching() -> None:
    cost = MODELS["constant"]
    burst = [Sequence([0], 1 + i % 7, id=str(i)) for i in range(20)]
    run = simulate(Scheduler(policies.get_policy("nobatch+sjf", max_batch_size=1)), burst, cost)
    least = bounds(burst, cost, 1)
    assert run.latency.mean() == pytest.approx(least.mean_latency)
    assert run.makespan == pytest.approx(least.makespan)


def test_prompts_that_begin_alike_may_be_cached() -> None:
    cost, pool = LINEAR[0], PagePool(10, 2)
    twins = [Sequence([1, 2, 3, 4, 5], 1, id=str(i)) for i in range(2)]
    apart = bounds(twins, cost, 2).makespan
    for seq in twins:
        seq.hashes = pool.hashes(seq.prompt_ids)
    assert bounds(twins, cost, 2, page_size=2).makespan == pytest.approx(apart - 2 * 4)


def on_one_machine(arrival: list[int], work: list[int], deadline: list[int]) -> Jobs:
    """Return jobs of which one is computed at a time."""
    starts, seconds, none = np.array(arrival, float), np.array(work, float), np.zeros(len(work))
    return Jobs(starts, seconds, seconds, none, none, none, none, 1, 0.0, np.array(deadline, float))


def test_missed_deadlines_stay_below_the_fewest_of_all_orders() -> None:
    rng = random.Random(3)
    for _ in range(60):
        arrival = [rng.randint(0, 8) for _ in range(5)]
        work = [rng.randint(1, 4) for _ in range(5)]
        deadline = [a + rng.randint(1, 9) for a in arrival]
        fewest = 5
        for order in permutations(range(5)):
            now, late = 0, 0
            for j in order:
                now = max(now, arrival[j]) + work[j]
                late += now > deadline[j]
            fewest = min(fewest, late)
        assert misses(on_one_machine(arrival, work, deadline)) <= fewest


def test_hopeless_deadlines_are_missed() -> None:
    many = [Sequence([0], 3, arrived_at=1.0, deadline=1.5), Sequence([0], 3, arrived_at=1.0, deadline=1e6)]
    assert bounds(many, LINEAR[0], 2).misses == 1


def test_the_best_of_two_unequal_requests_is_the_shorter_one_first() -> None:
    cost = MODELS["constant"]
    first, both = cost.seconds(decoding(1, 2)), cost.seconds(decoding(2, 4))
    pair = [Sequence([0], 3), Sequence([0], 1)]
    assert Optimum(pair, cost, 1).least_mean() == pytest.approx((first + 4 * first) / 2)
    assert Optimum(pair, cost, 2).least_mean() == pytest.approx((both + both + 2 * first) / 2)


def test_no_requests_have_no_bounds() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bounds([], LINEAR[0], 1)


def test_a_run_says_how_far_it_is_from_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, _ = run_command(capsys, "run", "dynamic", "--num", "50", "--rate", "3")
    simulation = numbers["simulation"]
    assert 0 <= simulation["above_least_duration"] < 0.05
    assert 0 <= simulation["above_least_mean_e2el"] < 0.5


def replayed(policy: str, many: list[tuple[float, list[int], int]], slots: int, pages: int = 0) -> dict[str, float]:
    """Return what the decisions of a run cost, in steps: each takes as long as the next."""

    def again() -> tuple[Scheduler, list[Sequence]]:
        rows = [Sequence(list(ids), tokens, id=str(i), arrived_at=at) for i, (at, ids, tokens) in enumerate(many)]
        return Scheduler(policies.get_policy(policy, slots), PagePool(pages + 1, 2) if pages else None), rows

    law = Affine(base=1, token=0) if not pages else Affine(base=0, token=1)
    return parts(simulate(*again(), law), law, again)


def test_the_order_costs_what_the_shorter_request_waited_for_the_longer_one() -> None:
    cost = replayed("dynamic", [(0, [0], 5), (0, [0], 1)], 1)
    assert cost == pytest.approx({"order": (5 + 6 - 1 - 6) / 2, "admission": 0, "cache": 0})


def test_the_admission_costs_what_a_request_waited_although_a_slot_was_free() -> None:
    cost = replayed("static", [(0, [0], 4), (1, [0], 2)], 2)
    assert cost == pytest.approx({"order": 0, "admission": (4 + 5 - 4 - 2) / 2, "cache": 0})


def test_the_cache_costs_the_prompt_that_was_evicted_between_two_requests() -> None:
    first, other = [1] * 9, [2] * 9
    cost = replayed("dynamic", [(0, first, 1), (20, other, 1), (40, first, 1)], 1, pages=5)
    assert cost == pytest.approx({"order": 0, "admission": 0, "cache": 8 / 3})


def test_a_policy_whose_hooks_fail_with_another_order_still_has_its_other_parts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from scheduling import policy\n\nclass Policy(policy.Policy):\n"
        "    def order(self, waiting, now):\n        self.first = [*waiting][-1:]\n        return self.first\n\n"
        "    def on_admit(self, seq, now):\n        self.first.remove(seq)\n"
    )
    cost = replayed(str(tmp_path / "own.py"), [(0, [0], 3), (0, [0], 1), (0, [0], 2)], 2)
    assert cost["order"] == 0
    assert cost["admission"] >= 0


def test_the_parts_and_the_rest_are_the_regret(capsys: pytest.CaptureFixture[str]) -> None:
    numbers, told = run_command(capsys, "run", "static", "--num", "50", "--rate", "9", "--max-batch-size", "4")
    simulation = numbers["simulation"]
    assert sum(simulation["above_by"].values()) == pytest.approx(simulation["above_least_mean_e2el"])
    assert simulation["above_by"]["admission"] > 0.1
    assert simulation["above_least_latency_per_token"] > 0
    assert "admission" in told


def test_a_run_with_refused_requests_has_no_bounds() -> None:
    assert "no lower bounds" in regret.sentence({})


def test_a_run_of_few_short_requests_is_compared_with_the_best_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("--num", "4", "--workload", "fixed:8:3", "--arrivals", "burst", "--max-batch-size", "2")
    numbers, _ = run_command(capsys, "run", "nobatch", "dynamic", *wanted)
    alone, batched = (run["simulation"] for run in numbers["runs"])
    assert batched["above_best_mean_e2el"] == pytest.approx(0)
    assert alone["above_best_mean_e2el"] > 0.2
    assert alone["least_mean_e2el_ms"] <= alone["best_mean_e2el_ms"]


def test_prompt_tokens_that_a_run_found_cached_cost_no_policy_anything() -> None:
    rows = [Sequence([i] * 9, 2, id=str(i)) for i in range(3)]
    scheduler = Scheduler(policies.get_policy("nobatch", max_batch_size=1))
    scheduler.batch.pages = KnownHits(None, {"1": 6})
    figures = regret.of(simulate(scheduler, rows, LINEAR[0]), LINEAR[0], scheduler)
    assert figures["above_least_duration"] == pytest.approx(0)
    assert "best_mean_e2el_ms" not in figures  # the search computes whole prompts

"""The simulator against exact results of queueing theory.

An estimate passes within 4 of its replication errors or 1 % of the exact value, and its error must be small enough to
say something. Each test names the figure it holds to. The quick run has a point of each kind of table with half the sample, --all has them all.
"""

from __future__ import annotations

import numpy as np
import pytest

from costs import published
from costs.cost import Cost
from costs.published import Constant
from costs.steps import Step
from simulate.simulator import simulate
from tests.support import points, sample
from tests.support.scheduling import make_scheduler
from tests.support.simulate import COST_A, agrees, poisson, replicate, run_poisson, sequences, uniform

Rng = np.random.Generator


def geometric(n: int, rng: Rng, mean: float = 64.0) -> np.ndarray:
    return rng.geometric(1 / mean, n)


def mean_latency(policy: str, slots: int, cost: Cost, rate: float, n: int, draw: object = uniform, **options: object):
    return lambda rng: float(run_poisson(policy, slots, cost, rate, draw(n, rng), rng, **options).latency.mean())


def ones(n: int, rng: Rng) -> np.ndarray:
    return np.ones(n, int)


SECONDS = Constant(1.0, 0.0)
SINGLE = points(
    1,
    (uniform, COST_A, 0.4, 0.6324),  # Pollaczek and Khinchine
    (uniform, COST_A, 1.5, 1.9850),
    (uniform, COST_A, 0.9, 0.8653),
    (uniform, COST_A, 1.2, 1.1730),
    (lambda n, rng: geometric(n, rng) + 1, COST_A, 1.2, 1.4503),
    (ones, SECONDS, 0.9, 5.5),  # M/D/1
    (ones, SECONDS, 0.5, 1.5),
)


@pytest.mark.parametrize(("draw", "cost", "rate", "exact"), SINGLE)
def test_nobatch_is_a_queue_of_one_server(draw: object, cost: Cost, rate: float, exact: float) -> None:
    found = replicate(mean_latency("nobatch", 1, cost, rate, sample(8000 if cost is SECONDS else 2000), draw), 6)
    assert agrees(found, exact), found
    assert found[1] < 0.06 * exact


@pytest.mark.full
def test_nobatch_on_llm_mock_is_m_d_1() -> None:
    def one(rng: Rng) -> float:
        trace = poisson(0.15, np.full(1500, 71), rng, prompt=100)
        return float(simulate(make_scheduler("nobatch", 1), trace, published.make("llm-mock")).latency.mean())

    found = replicate(one, 6)
    assert agrees(found, 8.2135), found


def test_clipping_answers_lowers_the_mean_latency() -> None:
    means = []
    for most in (128, 100, 70, 40):
        rng = np.random.default_rng(1)
        lengths = np.minimum(uniform(sample(2000), rng), most + 1)
        means.append(run_poisson("nobatch", 1, COST_A, 1.2, lengths, rng).latency.mean())
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize(
    ("slots", "rate", "exact", "batch", "busy"),
    points(
        1,
        (2, 1.5, 1.0068, 1.298, 0.6861),
        (8, 6.0, 1.8095, 6.084, 0.9982),
        (1, 1.2, 1.1730, 1.0, 0.6431),
        (4, 3.0, 1.3484, 2.351, 0.9308),
        (8, 3.0, 1.2164, 2.335, 0.9209),
        (16, 4.0, 1.3688, 3.348, 0.9736),
        (16, 7.0, 1.6983, 7.553, 0.9994),
    ),
)
def test_static_is_the_bulk_service_chain(slots: int, rate: float, exact: float, batch: float, busy: float) -> None:
    n, found = sample(2500), []
    for seed in range(5):
        rng = np.random.default_rng([seed, 1])
        run = run_poisson("static", slots, COST_A, rate, uniform(n, rng), rng)
        found.append((run.latency.mean(), n / run.batches, run.busy / run.ended))
    means, errors = np.mean(found, axis=0), np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    for mean, error, value in zip(means, errors, (exact, batch, busy)):
        assert agrees((mean, error), value), (mean, error, value)
    assert errors[0] < 0.05 * exact


@pytest.mark.parametrize(
    ("k", "rate", "exact"),
    points(
        1, (2, 1.0, 1.3085), (8, 4.5, 1.9382), (2, 2.0, 1.5142), (4, 2.0, 1.7093), (4, 3.0, 1.6101), (16, 10.0, 2.3266)
    ),
)
def test_fixed_is_fixed_bulk_service(k: int, rate: float, exact: float) -> None:
    found = replicate(mean_latency("fixed", k, COST_A, rate, sample(2000), k=k, flush=3600), 5)
    assert agrees(found, exact), found


ALPHA, TAU = 0.1438, 1.8874


def inoue(
    policy: str, slots: int, rate: float, n: int, seeds: int = 6
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return E[latency] in ms with its error, and the mean batch with its, at `rate` per ms."""
    batches: list[float] = []

    def one(rng: Rng) -> float:
        run = run_poisson(policy, slots, published.make("inoue-v100"), rate * 1000, np.ones(n, int), rng)
        batches.append(n / run.batches)
        return float(run.latency.mean() * 1000)

    found = replicate(one, seeds)
    return found, (float(np.mean(batches)), float(np.std(batches) / np.sqrt(seeds - 1)))


@pytest.mark.parametrize(
    ("rho", "exact", "batch"),
    points(
        1,
        (0.3, 4.2248, 5.632),
        (0.8, 14.7147, 52.501),
        (0.1, 3.1459, 1.712),
        (0.5, 5.9019, 13.125),
        (0.6, 7.3698, 19.688),
    ),
)
def test_a_window_without_delay_meets_inoues_table(rho: float, exact: float, batch: float) -> None:
    rate = rho / ALPHA
    found, (batches, error) = inoue("window", 4096, rate, sample(6000))
    assert agrees(found, exact), found
    assert abs(batches - batch) <= max(4 * error, 0.02 * batch)
    x = rate * ALPHA
    phi1 = 1.5 * TAU / (1 - x) + ALPHA / 2 * (x + 2) / (1 - x * x)
    phi0 = (ALPHA + TAU) / (2 * (1 - x)) * (1 + 2 * rate * TAU + (1 - rate * TAU) / (1 + x))
    assert found[0] <= min(phi0, phi1) * 1.01


@pytest.mark.parametrize(
    ("slots", "exact"), points(0, (4, 4.3698), (32, 6.8175), (1, 6.0936), (3, 4.5142), (8, 4.4997), (12, 4.8938))
)
def test_a_limited_batch_meets_inoues_table(slots: int, exact: float) -> None:
    rate = 0.8 * slots / (TAU + ALPHA * slots)
    found, _ = inoue("static", slots, rate, 4000, 5)
    assert agrees(found, exact), found


MEAN_S = 0.5359


def waits(order: str, rate: float, n: int = 2000, seeds: int = 6, **options: object) -> tuple[float, float]:
    name = f"nobatch+{order}" if order else "nobatch"
    return replicate(
        lambda rng: float(run_poisson(name, 1, COST_A, rate, uniform(n, rng), rng, **options).waiting.mean()), seeds
    )


@pytest.mark.parametrize(("rate", "fcfs", "sjf"), points(1, (1.3, 0.8121, 0.5872), (0.8, 0.2654, 0.2241)))
@pytest.mark.full
def test_the_mean_waits_of_one_server_are_those_of_phipps(rate: float, fcfs: float, sjf: float) -> None:
    found = waits("", rate)
    assert agrees(found, fcfs), found
    found = waits("sjf", rate, guard=1e9, guard_ratio=1e9)
    assert agrees(found, sjf), found


@pytest.mark.parametrize(
    ("rate", "classes", "accuracy", "exact"),
    points(
        1,
        (0.8, 4, 1.0, 0.2266),
        (1.3, 2, 0.8, 0.7019),
        (0.8, 2, 1.0, 0.2341),
        (0.8, 2, 0.8, 0.2457),
        (1.3, 2, 1.0, 0.6437),
        (1.3, 4, 1.0, 0.6022),
    ),
)
@pytest.mark.full
def test_classes_of_length_wait_as_cobham_says(rate: float, classes: int, accuracy: float, exact: float) -> None:
    predictor = {"predictor": "classes", "classes": classes, "accuracy": accuracy}
    found = waits("sjf", rate, guard=1e9, guard_ratio=1e9, **predictor)
    assert agrees(found, exact), found


@pytest.mark.full
def test_each_of_two_classes_waits_as_cobham_says() -> None:
    short, long = [], []
    for seed in range(6):
        rng = np.random.default_rng([seed, 3])
        run = run_poisson(
            "nobatch+sjf", 1, COST_A, 1.3, uniform(2000, rng), rng, guard=1e9, guard_ratio=1e9, predictor="classes"
        )
        is_long = run.tokens > 64 + 1
        short.append(run.waiting[~is_long].mean())
        long.append(run.waiting[is_long].mean())
    for found, exact in ((short, 0.2996), (long, 0.9877)):
        assert agrees((np.mean(found), np.std(found, ddof=1) / np.sqrt(6)), exact)


@pytest.mark.full
def test_the_service_time_weighted_wait_is_conserved() -> None:
    """Sum of rho_k W_k = rho W_FCFS = 0.565784 at 1.3 per second, whatever the order knows."""

    def conserved(order: str, options: dict[str, object]) -> tuple[float, float]:
        def one(rng: Rng) -> float:
            run = run_poisson(f"nobatch{order}", 1, COST_A, 1.3, uniform(2000, rng), rng, **options)
            service = run.latency - run.waiting
            return float(1.3 * (service * run.waiting).mean())

        return replicate(one, 6)

    assert agrees(conserved("", {}), 0.565784)
    assert agrees(conserved("+sjf", {"guard": 1e9, "guard_ratio": 1e9}), 0.565784)


@pytest.mark.parametrize(("order", "factor"), [("", 1.0), ("sjf", 1 - 0.3264)])
def test_a_burst_waits_by_the_gini_coefficient(order: str, factor: float) -> None:
    n = 300

    def one(rng: Rng) -> float:
        trace = sequences((0.0, 1, int(x)) for x in uniform(n, rng))
        options = {"guard": 1e9, "guard_ratio": 1e9} if order else {}
        run = simulate(make_scheduler(f"nobatch+{order}" if order else "nobatch", 1, **options), trace, COST_A)
        return float(run.waiting.mean())

    found = replicate(one, 10)
    assert agrees(found, (n - 1) / 2 * MEAN_S * factor), found


@pytest.mark.parametrize(
    ("slots", "bins", "exact"), points(1, (8, 1, 0.44720), (8, 2, 0.56360), (8, 8, 0.70030), (32, 4, 2.51354))
)
def test_multibin_meets_its_saturation(slots: int, bins: int, exact: float) -> None:
    class Longest(Cost):
        """A step takes one grain of time: a batch lasts as long as its longest member."""

        flat = True

        def seconds(self, step: Step) -> float:
            return 1 / 40

    bounds = tuple(int(40 * (1 + 19 * i / bins)) for i in range(1, bins))

    def one(rng: Rng) -> float:
        n = 60 * slots * bins
        lengths = np.ceil(rng.uniform(1, 20, n) * 40).astype(int)
        more = {"bounds": bounds} if bounds else {"k": 1}
        scheduler = make_scheduler("multibin", slots, flush=3600, **more)
        run = simulate(scheduler, sequences((0.0, 1, int(x)) for x in lengths), Longest())
        return n / run.ended

    mean, error = replicate(one, 3)
    assert mean == pytest.approx(exact, rel=0.02), (mean, error)


@pytest.mark.parametrize(
    ("a", "b", "steps", "rate", "exact", "n"),
    points(
        1,
        (8, 0.2, 100, 20, 1.3667, 2500),
        (5, 1, 50, 10, 0.6000, 2000),
        (8, 0.2, 100, 5, 0.9111, 1500),
        (8, 0.2, 100, 35, 2.7333, 3000),
        (15, 0.05, 64, 150, 1.8523, 3000),
    ),
)
def test_continuous_batching_is_processor_sharing(
    a: float, b: float, steps: int, rate: float, exact: float, n: int
) -> None:
    cost = Constant(a / 1000, b / 1000)
    found = replicate(mean_latency("dynamic", 4096, cost, rate, sample(n), lambda n, rng: np.full(n, steps)), 3)
    assert exact * 0.99 - 4 * found[1] <= found[0] <= exact * 1.04 + 4 * found[1], found


def test_latency_under_continuous_batching_is_a_line_through_the_origin() -> None:
    rng = np.random.default_rng(4)
    run = run_poisson("dynamic", 4096, Constant(), 20, rng.integers(5, 196, sample(6000)), rng)
    slope, intercept = np.polyfit(run.tokens, run.latency, 1)
    assert np.corrcoef(run.tokens, run.latency)[0, 1] > 0.98
    assert slope == pytest.approx(0.0082 / (1 - 20 * 0.1 * 0.2), rel=0.04)
    assert abs(intercept) < 0.03


@pytest.mark.parametrize(
    ("slots", "rate", "exact"), points(1, (8, 6.6667, 1.1969), (16, 7.1429, 0.9572), (32, 17.7778, 1.2898))
)
def test_continuous_batching_with_a_cap_is_its_birth_death_chain(slots: int, rate: float, exact: float) -> None:
    draw = lambda n, rng: geometric(n, rng, 100.0)  # noqa: E731
    mean, error = replicate(mean_latency("dynamic", slots, Constant(), rate, sample(3000), draw), 4)
    assert exact * 0.99 - 4 * error <= mean <= exact * 1.04 + 4 * error, (mean, error)


@pytest.mark.parametrize(("slots", "exact"), [(8, 833.33), (16, 1428.57), (32, 2222.22)])
def test_a_saturated_cap_gives_exactly_its_throughput(slots: int, exact: float) -> None:
    trace = sequences((0.0, 1, 50) for _ in range(20 * slots))
    run = simulate(make_scheduler("dynamic", slots), trace, Constant())
    assert run.tokens.sum() / run.makespan == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("slots", "longest"), points(0, (8, 114.273), (2, 85.832), (12, 118.646), (32, 124.600)))
def test_a_static_batch_runs_for_the_expected_maximum(slots: int, longest: float) -> None:
    rng = np.random.default_rng(8)
    n = 16_000 // slots
    trace = sequences((0.0, 1, int(x)) for x in uniform(n * slots, rng))
    run = simulate(make_scheduler("static", slots), trace, COST_A)
    assert run.batches == n
    assert (run.steps - n) / n == pytest.approx(longest, rel=0.02)


@pytest.mark.parametrize(("slots", "exact"), points(1, (4, 4.3549), (1, 1.8660), (16, 11.4963)))
def test_the_capacity_of_static_is_its_batch_over_its_time(slots: int, exact: float) -> None:
    rng = np.random.default_rng(9)
    n = sample(6000 + 600 * slots)
    trace = sequences((0.0, 1, int(x)) for x in uniform(n, rng))
    run = simulate(make_scheduler("static", slots), trace, COST_A)
    assert n / run.ended == pytest.approx(exact, rel=0.02)


LOOPS = ["dynamic", "dynamic+hrrn", "dynamic+svf", "dynamic+boost", "chunked", "time-budget", "static", "elastic"]


@pytest.mark.parametrize("loop", LOOPS)
def test_batching_that_conserves_work_is_stable_below_capacity_and_static_is_not(loop: str) -> None:
    """At 0.85 of what 8 full slots decode. A static batch takes as long as the longest of 8 answers, 2.7 times the mean."""
    rng = np.random.default_rng(11)
    rate = 0.85 * 8 / (0.0096 * 64)
    waits = run_poisson(loop, 8, Constant(), rate, geometric(2400, rng), rng).waiting
    early, late = waits[600:1200].mean(), waits[1800:].mean()
    if loop in ("static", "elastic"):
        assert late > 1.7 * early > 10
    else:
        assert late < 10

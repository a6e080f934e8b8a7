"""Shapes and ratios that others published: Anyscale's test, the original's own data, Orca, Sarathi (notes, 9.2 to 9.4).

TGI's 8x over the naive baseline is not met, and is not expected to be: its OPT path of 2023 was slow, not its policy. Nor is
"vLLM twice any naive continuous batching": at equal cost the two differ by 1.04 at R = 32 and by 1.4 at R = 1536.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from client.workloads.catalog import anyscale_outputs
from costs import published
from costs.cost import Affine
from simulate import workloads
from simulate.simulator import Run, simulate
from tests.support.scheduling import make_scheduler
from tests.support.simulate import run_poisson, sequences

OPT = published.make("distserve-opt13b", {"memory": 2039 / 1555})  # decode on the bandwidth of an A100-40G
SETTINGS = {32: (16, 8700), 128: (12, 7500), 512: (8, 8100), 1536: (4, 8100)}  # R: batch, TGI's budget
LOOPS = ("static-global", "static", "tgi", "prefill-first")


@cache
def anyscale(loop: str, most: int, seed: int) -> tuple[float, Run]:
    """Return tokens a second as Anyscale counts them, prompt + generated, of 1,000 prompts of 512 at once."""
    slots, budget = SETTINGS[most]
    prompts, outputs = np.full(1000, 512), anyscale_outputs(np.random.default_rng(seed), 1000, most)
    scheduler = {
        "static-global": lambda: make_scheduler("static-global", slots),
        "static": lambda: make_scheduler("static", slots),
        "tgi": lambda: make_scheduler("tgi", 1000, ratio=1.2, max_waiting=7, max_total_tokens=budget),
        "prefill-first": lambda: make_scheduler("prefill-first", 256, kv_tokens=12_000, max_batched_tokens=8100),
    }[loop]()
    run = simulate(scheduler, sequences((0.0, 512, int(n)) for n in outputs), OPT)
    return float(prompts.sum() + outputs.sum()) / run.ended, run


def mean_rate(loop: str, most: int) -> float:
    return float(np.mean([anyscale(loop, most, seed)[0] for seed in range(2)]))


@pytest.mark.parametrize(
    ("most", "slots", "mean", "of_batch", "of_all"),
    [(32, 16, 15.56, 30.32, 32.0), (512, 8, 118.48, 300.79, 505.9), (1536, 4, 127.99, 266.63, 953.8)],
)
def test_the_lengths_are_anyscales(most: int, slots: int, mean: float, of_batch: float, of_all: float) -> None:
    drawn = [anyscale_outputs(np.random.default_rng(s), 1000, most) for s in range(60)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.01)
    batches = [d[: 1000 // slots * slots].reshape(-1, slots).max(axis=1).mean() for d in drawn]
    assert np.mean(batches) == pytest.approx(of_batch, rel=0.01)
    assert np.mean([d.max() for d in drawn]) == pytest.approx(of_all, rel=0.05 if most > 1000 else 0.01)


@pytest.mark.full
def test_the_naive_baseline_and_vllm_come_near_what_was_measured() -> None:
    assert mean_rate("static-global", 1536) == pytest.approx(81, rel=0.25)
    assert mean_rate("prefill-first", 1536) == pytest.approx(1900, rel=0.25)


@pytest.mark.full
def test_fastertransformer_is_static_with_a_second_of_sleep_before_each_batch() -> None:
    ratios = []
    for seed in range(2):
        rate, run = anyscale("static", 1536, seed)
        with_sleep = rate * run.ended / (run.ended + run.batches)
        ratios.append(with_sleep / anyscale("static-global", 1536, seed)[0])
    assert 3 < np.mean(ratios) < 4.5


@pytest.mark.full
def test_the_loops_keep_their_order_and_the_gap_widens_with_the_spread_of_lengths() -> None:
    gaps = []
    for most in SETTINGS:
        rates = [mean_rate(loop, most) for loop in LOOPS]
        assert rates == sorted(rates), (most, rates)
        gaps.append(rates[-1] / rates[0])
    assert all(a < b for a, b in pairwise(gaps))


@pytest.mark.full
def test_equal_cost_makes_vllm_and_tgi_differ_by_little() -> None:
    """Said openly: what was published as twice is 1.04 and about 1.4 when every step costs the same."""
    assert mean_rate("prefill-first", 32) / mean_rate("tgi", 32) == pytest.approx(1.04, abs=0.05)
    assert mean_rate("prefill-first", 1536) / mean_rate("tgi", 1536) == pytest.approx(1.38, abs=0.15)


def test_dynamic_is_proportional_to_tokens_and_request_level_loops_are_flat_as_the_original_measured() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.choice(np.arange(5, 150, 5), 600)
    cost = Affine(base=0.008, row=0.0002)
    continuous = run_poisson("dynamic", 4096, cost, 20, lengths, rng)
    slope, intercept = np.polyfit(continuous.tokens, continuous.latency, 1)
    assert np.corrcoef(continuous.tokens, continuous.latency)[0, 1] > 0.98
    assert abs(intercept) < 0.05 * continuous.latency.mean()
    assert slope > 0
    for loop, slots, rate in (("nobatch", 1, 1.4 * 1.6), ("static", 8, 1.4 * 6.4)):
        run = run_poisson(loop, slots, cost, rate, lengths, np.random.default_rng(3))
        assert np.corrcoef(run.tokens, run.latency)[0, 1] < 0.7


def test_more_slots_raise_orcas_throughput_and_leave_its_low_load_alone() -> None:
    cost = Affine(base=0.019, token=4e-5, row=1e-4, context=2e-7)
    floods, lone = [], []
    for slots in (1, 8, 16, 32):
        rows = workloads.draw("orca", 0.05, 150, seed=1)
        lone_run = simulate(make_scheduler("dynamic", slots), rows.sequences(), cost)
        lone.append(np.median(lone_run.latency / lone_run.tokens))
        burst = workloads.draw("orca", 1.0, 600, seed=1, arrivals="burst")
        flood = simulate(make_scheduler("dynamic", slots), burst.sequences(), cost)
        floods.append(flood.tokens.sum() / flood.makespan)
    assert all(b > 1.3 * a for a, b in pairwise(floods))
    assert max(lone) / min(lone) < 1.02


def test_equal_lengths_bring_static_near_dynamic_and_unequal_ones_part_them() -> None:
    cost = published.make("oracle-a")

    def ratio(lengths: np.ndarray) -> float:
        makespans = [
            simulate(make_scheduler(loop, 8), sequences((0.0, 1, int(n)) for n in lengths), cost).makespan
            for loop in ("static", "dynamic")
        ]
        return makespans[0] / makespans[1]

    assert ratio(np.full(800, 64)) < 1.2
    assert ratio(np.random.default_rng(0).geometric(1 / 64, 800)) > 1.8


def test_chunks_bound_the_stall_and_hybrid_steps_bound_the_wait_as_sarathi_measured() -> None:
    """Long prompts: prefill-first has the worst gaps; chunks make them small at some cost in TTFT."""
    cost = Affine(base=0.02, token=1e-4, row=1e-4, context=2e-7)
    found = {}
    for loop, options in (("prefill-first", {}), ("chunked", {"max_batched_tokens": 256}), ("dynamic", {})):
        rng = np.random.default_rng(1)
        at = np.cumsum(rng.exponential(0.9, 250))
        rows = zip(at.tolist(), rng.integers(200, 4000, 250).tolist(), rng.integers(20, 200, 250).tolist())
        run = simulate(make_scheduler(loop, 64, budget=1 << 20, **options), sequences(rows), cost)
        found[loop] = (float(np.median(run.ttft)), float(np.percentile(np.array(run.gaps), 99)))
    assert found["chunked"][1] < found["dynamic"][1] / 2 < found["prefill-first"][1]
    assert found["prefill-first"][0] < found["chunked"][0]


@pytest.mark.full
def test_the_window_is_far_behind_dynamic_at_equal_latency_as_friendliai_measured() -> None:
    """At 11 ms a token of GPT-2's size: rates that both hold, apart by a factor of 5 to 30."""
    cost = Affine(base=0.004, token=5e-6, row=2e-5)

    def holds(loop: str, slots: int, rate: float, **options: object) -> bool:
        rows = workloads.draw("orca", rate, 700, seed=2)
        run = simulate(make_scheduler(loop, slots, budget=1 << 20, **options), rows.sequences(), cost)
        return float((run.latency / run.tokens).mean()) < 0.011

    def best(loop: str, slots: int, **options: object) -> float:
        rates = [rate for rate in 0.5 * 1.3 ** np.arange(22) if holds(loop, slots, rate, **options)]
        return max(rates, default=0.25)

    assert 5 < best("dynamic", 256) / best("window", 8, delay=0.01) < 400

"""The original's statistics, with its formulas."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stats import ServerStats, percentiles


class Clock:
    """Returns the time it was set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stats(clock: Clock) -> ServerStats:
    return ServerStats(clock=clock)


def test_before_the_first_request_figures_are_null_or_zero(stats: ServerStats) -> None:
    snapshot = stats.snapshot()
    original = ("latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time")
    assert [snapshot[key] for key in original] == [None, None, 0, 0]
    assert snapshot["throughput-wall"] is None
    assert {v for k, v in snapshot.items() if k[-4:-2] == "-p"} == {None}
    assert stats.token_breakdown() == {}


def test_the_formulas_are_the_originals(stats: ServerStats, clock: Clock) -> None:
    first, second = stats.start_request(10), stats.start_request(40)
    clock.now = 2.0
    stats.finish_request(first)  # 0.2 s a token
    clock.now = 4.0
    stats.finish_request(second)  # 0.1 s a token
    assert stats.latency_per_token() == pytest.approx(0.15)
    assert stats.throughput() == pytest.approx(50 / 6)
    assert stats.throughput_wall() == pytest.approx(50 / 4)
    snapshot = stats.snapshot()
    assert (snapshot["total-tokens-handled"], snapshot["total-elapsed-time"]) == (50, 6.0)
    assert stats.table == {}


def test_the_breakdown_is_the_mean_latency_by_requested_tokens(stats: ServerStats, clock: Clock) -> None:
    for tokens, end in [(100, 3.0), (25, 4.0), (100, 6.0)]:
        rid = stats.start_request(tokens)
        clock.now = end
        stats.finish_request(rid)
    assert list(stats.token_breakdown().items()) == [(25, 1.0), (100, 2.5)]


def test_the_wall_clock_runs_from_the_first_arrival_to_the_last_completion(stats: ServerStats, clock: Clock) -> None:
    clock.now = 2.0
    slow = stats.start_request(16)
    clock.now = 4.0
    quick = stats.start_request(4)
    clock.now = 6.0
    stats.finish_request(quick)
    clock.now = 12.0
    stats.finish_request(slow)
    assert stats.throughput_wall() == pytest.approx(20 / 10)


def test_the_uptime_begins_with_the_server(stats: ServerStats, clock: Clock) -> None:
    clock.now = 9.0
    assert stats.engine()["uptime_s"] == 9.0


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for n in (1, 2, 3, 100, 1001):
        values = [rng.expovariate(1) for _ in range(n)]
        assert percentiles(values, (0, 50, 90, 99, 100)) == pytest.approx(np.percentile(values, (0, 50, 90, 99, 100)))
    assert percentiles([], (50, 99)) == [None, None]

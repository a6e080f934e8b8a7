"""The figures of /stats, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.iteration import Iteration, Member, SlotSteps
from scheduling.sequence import Sequence
from stats import ServerStats, percentile


class Clock:
    """Tells the time it was set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def finished(arrived: float, first: float, last: float, tokens: int, *, asked: int = 0, id: str = "a") -> Sequence:
    """Return a sequence that got `tokens` tokens between `first` and `last`."""
    seq = Sequence([1], asked or tokens, id=id, arrived_at=arrived, finish_reason="length")
    seq.output_ids = [7] * tokens
    seq.first_token_at, seq.last_token_at, seq.finished_at = first, last, last
    return seq


def step(t: float, seconds: float, *members: tuple[str, str]) -> Iteration:
    """Return the record of a step of a server with four slots."""
    rows = [Member(id, i, phase, 1, 1, 9) for i, (id, phase) in enumerate(members)]
    held = sum(phase == "held" for _, phase in members)
    spent = SlotSteps(useful=len(rows) - held, held=held, idle=4 - len(rows))
    return Iteration(0, t, seconds, "dynamic", 0, rows, [], [], spent, 0, 0)


def test_before_the_first_request_there_is_nothing_and_no_error() -> None:
    snapshot = ServerStats().snapshot()
    original = ("latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time")
    assert [snapshot[key] for key in original] == [None, None, 0, 0]
    assert snapshot["throughput-wall"] is None
    assert {v for k, v in snapshot.items() if k[-4:-2] == "-p"} == {None}
    assert ServerStats().token_breakdown() == {}


def test_the_originals_formulas_are_kept() -> None:
    clock = Clock()
    stats = ServerStats(clock)
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


def test_the_breakdown_is_the_mean_latency_by_tokens_asked_for() -> None:
    clock = Clock()
    stats = ServerStats(clock)
    for tokens, until in [(100, 3.0), (25, 4.0), (100, 6.0)]:
        rid = stats.start_request(tokens)
        clock.now = until
        stats.finish_request(rid)
    stats.finish(finished(0, 1, 8, tokens=3, asked=25))
    assert list(stats.token_breakdown().items()) == [(25, 4.5), (100, 2.5)]


def test_a_sequence_counts_the_tokens_it_got() -> None:
    stats = ServerStats()
    stats.finish(finished(10, 12, 20, tokens=5, asked=50))
    stats.finish(finished(11, 13, 13, tokens=1))
    snapshot = stats.snapshot()
    assert (snapshot["requests"], snapshot["total-tokens-handled"]) == (2, 6)
    assert snapshot["latency-per-token"] == pytest.approx((10 / 5 + 2 / 1) / 2)
    assert snapshot["throughput"] == pytest.approx(6 / 12)
    assert snapshot["throughput-wall"] == pytest.approx(6 / 10)
    assert snapshot["ttft-p50"] == 2
    assert snapshot["tpot-p50"] == 2  # of the first alone: one token has no time between tokens
    assert snapshot["latency-p50"] == 6


def test_the_wall_clock_runs_from_the_first_arrival_whoever_finishes_first() -> None:
    stats = ServerStats()
    stats.finish(finished(4, 5, 6, tokens=4))
    stats.finish(finished(2, 5, 12, tokens=16))
    assert stats.throughput_wall() == pytest.approx(20 / 10)


def test_failed_and_cancelled_requests_are_counted_apart() -> None:
    stats = ServerStats()
    failed, cancelled = finished(0, 1, 2, tokens=2), finished(0, 1, 2, tokens=2)
    failed.error, failed.finish_reason = RuntimeError(), "abort"
    cancelled.finish_reason = "abort"
    stats.finish(failed)
    stats.finish(cancelled)
    snapshot = stats.snapshot()
    counts = ("requests", "requests-failed", "requests-cancelled", "total-tokens-handled")
    assert [snapshot[key] for key in counts] == [0, 1, 1, 0]
    assert snapshot["latency-p50"] is None


def test_gaps_between_tokens_are_counted_from_step_to_step() -> None:
    stats = ServerStats()
    stats.record(step(0, 1, ("a", "prefill")))
    stats.record(step(1, 1, ("a", "prefill")))  # the second half of its prompt: a token at 2
    stats.record(step(2, 3, ("a", "decode"), ("b", "prefill")))  # 5
    stats.record(step(5, 1, ("a", "held"), ("b", "decode")))  # 6
    stats.record(step(6, 1, ("a", "held"), ("b", "decode")))  # 7
    assert sorted(stats._itl) == [1, 1, 3]
    assert stats.snapshot()["itl-p50"] == 1


def test_who_has_left_is_forgotten() -> None:
    stats = ServerStats()
    for i in range(50):
        stats.record(step(i, 1, (f"r{i}", "prefill")))
        stats.finish(finished(i, i + 1, i + 1, tokens=1, id=f"r{i}"))
    assert stats._last_token == {}


def test_the_loop_is_described_by_its_steps() -> None:
    clock = Clock()
    stats = ServerStats(clock)
    stats.record(step(0, 1.0, ("a", "prefill")))
    stats.record(step(1, 2.0, ("a", "decode"), ("b", "held")))
    stats.record(step(3, 4.0, ("a", "decode"), ("b", "held")))
    clock.now = 9.0
    engine = stats.engine()
    assert (engine["iterations"], engine["uptime_s"]) == (3, 9.0)
    assert engine["batch_stats"] == [
        {"batch_size": 1, "count": 1, "seconds": 1.0},
        {"batch_size": 2, "count": 2, "seconds": 6.0},
    ]
    spent = engine["slot_steps"]
    assert spent == {"useful": 3, "padding": 0, "held": 2, "idle": 7, "recomputed": 0}
    assert sum(spent.values()) == 3 * 4


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-6)


def test_a_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None

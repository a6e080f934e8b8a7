"""The token bucket that limits how often an event happens."""

from __future__ import annotations

from serving.deadlines import TokenBucket


def test_a_bucket_lets_a_burst_through_and_then_keeps_its_rate() -> None:
    bucket = TokenBucket(rate=8, burst=3)
    assert [bucket.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert sum(bucket.take(100.0 + i / 128) for i in range(1280)) == 79  # eight a second


def test_a_pause_gives_no_more_than_a_burst() -> None:
    bucket = TokenBucket(rate=8, burst=3)
    assert bucket.take(0.0)
    assert sum(bucket.take(1000.0) for _ in range(100)) == 3

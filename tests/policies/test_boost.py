"""The order boost: by hand, and the tail of a single server (Yu and Scully 2024)."""

from __future__ import annotations

import random
from math import exp, log

import numpy as np
import pytest

import policies
from policies.orders.boost import best_rate
from scheduling.sequence import Sequence
from tests.support.scheduling import requests

FREE = {"guard": 1e9, "w_p": 0.0}


def paced(**options: object) -> policies.Policy:
    """Return a policy that knows that each token is a second of work."""
    policy = policies.get_policy("nobatch+boost", 1, {**FREE, **options})
    policy._busy = policy._worked = 1.0  # type: ignore[attr-defined]
    return policy


def test_a_short_request_counts_as_having_come_earlier_by_its_boost() -> None:
    """By hand, with g = 1: b(3) = ln(1 / (1 - e^-3)) = 0.051, b(1) = 0.459. So 0 - 0.051, 0.3 - 0.459 and 0.45 - 0.459."""
    trace = requests((0, 1, 3), (0.3, 1, 1), (0.45, 1, 1))  # type: ignore[arg-type]
    for gamma, wanted in ((1.0, "102"), (100.0, "012"), (0.001, "120")):
        policy = paced(gamma=gamma)
        for seq in trace:
            policy.on_arrival(seq, seq.arrived_at)
        assert "".join(seq.id[1] for seq in policy.order(trace, 1.0)) == wanted


def test_a_predicted_size_counts_by_those_that_were_predicted_alike() -> None:
    policy = paced(gamma=0.5, predictor="classes", classes=1, longest=8)
    for tokens in (2, 6):
        (seq,) = requests((0, 1, tokens))
        policy.on_arrival(seq, 0)
        policy.on_admit(seq, 0)
        seq.output_ids = [0] * tokens
        policy.on_finish(seq, 4.0)  # so that 8 s and 9 tokens are known with those before
    pace, mean = 9 / 9, (exp(0.5 * 2) + exp(0.5 * 6)) / 2
    assert policy._busy / policy._worked == pace  # type: ignore[attr-defined]
    (seq,) = requests((10, 1, 3))
    assert policy.key(seq, 10) == pytest.approx(10 - log(mean / (mean - 1)) / 0.5)  # type: ignore[attr-defined]


def test_the_best_rate_of_a_single_server_is_what_its_load_leaves() -> None:
    sizes = [-log(1 - (k + 0.5) / 4000) for k in range(4000)]  # exponential with mean 1
    for load in (0.5, 0.8, 0.9):
        assert best_rate(load, sizes) == pytest.approx(1 - load, rel=0.02)
    assert best_rate(1.01, sizes) == 0
    assert best_rate(0.8, [1.0]) == pytest.approx(0.4308, abs=0.001)  # g = 0.8 (e^g - 1)
    assert best_rate(0.8, [1.0] * 999 + [200.0]) > 0.1  # a huge one counts as twenty times the mean


def latencies(name: str, count: int, **options: object) -> tuple[np.ndarray, policies.Policy]:
    """Return the latencies of an M/M/1 queue at a load of 0.8, with one token for each hundredth of the mean service."""
    rng, policy = random.Random(3), policies.get_policy(f"nobatch+{name}", 1, options)
    at = now = 0.0
    arriving: list[Sequence] = []
    for i in range(count):
        at += rng.expovariate(0.8)
        arriving.append(Sequence([], max(1, round(100 * rng.expovariate(1))), id=f"r{i}", arrived_at=at))
    waiting: dict[Sequence, None] = {}
    arriving.reverse()
    found = []
    while arriving or waiting:
        now = now if waiting else max(now, arriving[-1].arrived_at)
        while arriving and arriving[-1].arrived_at <= now:
            seq = arriving.pop()
            waiting[seq] = None
            policy.on_arrival(seq, seq.arrived_at)
        seq = next(iter(policy.order(waiting, now)))
        del waiting[seq]
        seq.scheduled_at = now
        policy.on_admit(seq, now)
        now += seq.max_tokens / 100
        seq.output_ids, seq.finish_reason = [0] * seq.max_tokens, "length"
        policy.on_finish(seq, now)
        found.append(now - seq.arrived_at)
    return np.array(found), policy


def test_the_tail_is_shorter_than_in_order_of_arrival_and_shortest_first() -> None:
    count = 20_000
    fcfs, _ = latencies("fcfs", count)
    sjf, _ = latencies("sjf", count, guard=1e9, guard_ratio=1e9)
    boost, _ = latencies("boost", count, gamma=0.2, **FREE)
    estimated, policy = latencies("boost", count, **FREE)
    tail, far = ([np.quantile(each, q) for each in (boost, fcfs, sjf)] for q in (0.99, 0.999))
    assert tail[0] < 0.97 * tail[1]
    assert far[0] < far[1]
    assert far[2] > 1.3 * far[1]
    assert sjf.mean() < boost.mean() < fcfs.mean()
    assert np.quantile(estimated, 0.99) < 0.97 * tail[1]
    assert 0.05 < policy.rate < 0.5  # type: ignore[attr-defined]

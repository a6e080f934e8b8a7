"""What every autoscaler must keep, tested on random loads and on a model of a fleet under a constant load."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from routing.autoscalers import Autoscaler, Bounds, Load

LOADS = 30  # random loads of one case
ROUNDS, SETTLED = 120, 30  # decisions under a constant load, and the last of them, which must be the same

# How the requests inside a replica grow with the share of its throughput that is asked for: not at all, or as in queues.
SHAPES: tuple[Callable[[float], float], ...] = (
    lambda share: 1.0,
    lambda share: 1.0 + share,
    lambda share: 1 / max(1 - share, 0.05),
)


def broken_law(wanted: Autoscaler, seed: int, *, steady: bool = True) -> str | None:
    """Return the law that an autoscaler breaks in the case of this seed, in words; None if it keeps all.

    `steady`: under a constant load it comes to want the same number each time.
    """
    rng = Random(seed)
    least = rng.randint(1, 4)
    bounds = Bounds(least, least + rng.randint(0, 12))
    for _ in range(LOADS):
        replicas = _loads(rng, rng.randint(1, bounds.most))
        before = list(replicas)
        count = wanted(replicas, bounds)
        if replicas != before or count != wanted(replicas, bounds):
            return "purity: the same loads gave another number, or were changed"
        if type(count) is not int or not bounds.least <= count <= bounds.most:
            return f"within the bounds: {count!r} for {bounds.least}..{bounds.most}"
        streams = sum(max(load.kv_used, load.running / load.slots if load.slots else 0.0) for load in replicas)
        if count < min(bounds.most, math.ceil(streams - 1e-9)):
            return f"room for running requests: {count} for requests that fill {streams:.3g} replicas"
    return _flapping(wanted, rng, bounds) if steady else None


def _loads(rng: Random, count: int) -> list[Load]:
    slots, kv_tokens = rng.choice([0, 1, 8, 32]), rng.choice([0, 4096, 65536])
    busy = rng.random()
    return [
        Load(
            running=rng.randint(0, slots or 40), waiting=rng.choice([0, rng.randint(0, 99)]), slots=slots,
            kv_used=rng.random() if kv_tokens else 0.0, kv_tokens=kv_tokens, waiting_tokens=rng.randint(0, 50_000),
            prefill_tokens=rng.randint(0, 50_000),
        )
        if rng.random() < busy
        else Load(slots=slots, kv_tokens=kv_tokens)
        for _ in range(count)
    ]  # fmt: skip


def _flapping(wanted: Autoscaler, rng: Random, bounds: Bounds) -> str | None:
    """Ask again and again under a constant load, at which requests queue up where the replicas are too few."""
    slots = rng.choice([8, 32])
    demand = rng.uniform(0.02, 1.2) * bounds.most  # replicas that it would fill
    shape, tokens = rng.choice(SHAPES), rng.choice([50, 500, 5000])
    kv_tokens = rng.choice([0, slots * tokens * 2, slots * tokens // 2])
    count, queued, counts = rng.randint(bounds.least, bounds.most), 0.0, []
    for _ in range(ROUNDS):
        served = min(demand, 0.95 * count)
        queued = max(0.0, queued + (demand - served - 0.2 * (0.95 * count - served)) * slots)
        running = min(served * shape(served / count) * slots / count, slots)
        held = min(1.0, running * tokens / kv_tokens) if kv_tokens else 0.0
        waiting = queued / count
        load = Load(running, waiting, slots, held, kv_tokens, waiting * tokens, waiting * tokens / 2)
        count = wanted([load] * count, bounds)
        counts.append(count)
    last = set(counts[-SETTLED:])
    return f"no flapping under a constant load: {sorted(last)} replicas in turn" if len(last) > 1 else None

"""What the lessons of docs/tutorial ask of a policy: requests drawn from a seed, a figure, and who sets the scale.

The draws use whole numbers and products alone, which are the same bits on every machine and in a browser; numpy and the
logarithm of the C library are not. This module must not know grades, files or laws.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import policies
from costs.cost import Cost
from costs.published import VTC_A10G
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

COST: Cost = VTC_A10G  # Llama-2-7B on an A10G
REQUESTS, PAGE = 200, 16
GAPS = (0, 0, 0, 1, 1, 4)  # in units of the lesson's own; some requests arrive together
SYSTEM, QUESTION = 256, 32  # tokens of the prompts that begin alike

Draw = Callable[[random.Random], Sequence]


@dataclass(frozen=True)
class Lesson:
    """One task: `field` of simulate.arena.measures, from what first come, first served reaches (`base`) to the best known."""

    title: str
    field: str
    base: str
    best: tuple[str, ...]
    draw: Draw
    gap: float  # seconds
    slots: int = 4
    kv_tokens: int = 0

    def sequences(self, seed: str) -> list[Sequence]:
        """Return fresh requests, the same for the same seed."""
        rng, at, drawn = random.Random(seed), 0.0, []
        for number in range(REQUESTS):
            seq = self.draw(rng)
            at += self.gap * rng.choice(GAPS)
            seq.id, seq.arrived_at = str(number), at
            if seq.deadline is not None:
                seq.deadline += at
            drawn.append(seq)
        return drawn

    def scheduler(self, name: str, make_scheduler: Callable[..., Scheduler] = Scheduler) -> Scheduler:
        """Return a fresh scheduler of a policy, with KV pages where the lesson limits them."""
        pages = PagePool(self.kv_tokens // PAGE + 1, PAGE, salt="lesson") if self.kv_tokens else None
        return make_scheduler(policies.get_policy(name, self.slots), pages, 2048)


def _any(rng: random.Random) -> Sequence:
    return Sequence([0] * rng.randint(10, 80), rng.randint(10, 190))


def _short_or_long(rng: random.Random) -> Sequence:
    return Sequence([0] * 32, rng.choice((16, 16, 16, 16, 240)))


def _two_clients(rng: random.Random) -> Sequence:
    """Three requests of `heavy` to one of `light`."""
    return Sequence([0] * 32, rng.randint(20, 80), client=rng.choice(("heavy", "heavy", "heavy", "light")))


def _one_of_eight_prompts(rng: random.Random) -> Sequence:
    system, own = rng.randint(1, 8), [rng.randint(100, 999) for _ in range(QUESTION)]
    return Sequence([system] * SYSTEM + own, rng.randint(1, 8))


def _with_deadline(rng: random.Random) -> Sequence:
    tokens = rng.randint(10, 120)
    return Sequence([0] * 32, tokens, deadline=rng.choice((0.08, 0.4)) * tokens)


LESSONS = {
    "slots": Lesson("Steps and slots", "p99", "nobatch", ("dynamic",), _any, 1.25),
    "sjf": Lesson("Shortest job first", "mean", "dynamic", ("dynamic+sjf", "dynamic+srpt"), _short_or_long, 0.6),
    "load": Lesson("Where static equals dynamic", "mean", "static", ("dynamic",), _any, 1.25),
    "fair": Lesson("Fairness", "light", "dynamic", ("dynamic+vtc",), _two_clients, 0.5),
    "prefix": Lesson(
        "Prefix caches", "mean", "dynamic", ("dynamic+lpm", "tgi+lpm"), _one_of_eight_prompts, 0.11, slots=2, kv_tokens=1536
    ),
    "slo": Lesson("Deadlines", "misses", "dynamic", ("dynamic+edf", "dynamic+sjf"), _with_deadline, 0.8),
}  # fmt: skip

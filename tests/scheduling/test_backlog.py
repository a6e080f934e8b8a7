"""The estimate of an arrival, which goes on from the last one, is that of the whole queue gone through step by step."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

import policies
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from tests.support.scheduling import KnownLaw


def step_by_step(scheduler: Scheduler, seq: Sequence) -> tuple[float, float]:
    """Return after how long a new sequence joins and ends."""
    inside = [[one.pending, one.max_tokens - len(one.output_ids)] for one in scheduler.running]
    queue = [[one.pending, one.max_tokens - len(one.output_ids)] for one in (*scheduler.waiting, seq)]
    mine, now, joins_at = queue[-1], 0.0, None
    while mine[1]:
        while queue and len(inside) < scheduler.policy.max_batch_size:
            inside.append(queue.pop(0))
        if joins_at is None and not queue:
            joins_at = now
        now += 10 + sum(rows for rows, _ in inside)
        inside = [[1, left - 1] for _, left in inside if left > 1]
        mine[1] -= mine[1] > 0 and not queue
    assert joins_at is not None
    return joins_at, now


class Served:
    """A scheduler to which a test does one thing after the other."""

    def __init__(self, slots: int, budget: int) -> None:
        self.scheduler = Scheduler(policies.get_policy("dynamic+admission-control", slots), None, budget)
        self.scheduler.backlog.law = KnownLaw()
        self.plan: Plan | None = None
        self.now, self.ended, self.arrived = 0.0, 0.0, 0

    def act(self, kind: str, a: int, b: int) -> None:
        inside = [*self.scheduler.waiting, *self.scheduler.running]
        if kind in ("add", "refuse"):
            self.add(a, b, is_late=kind == "refuse")
        elif kind in ("plan", "commit"):
            self.commit()
        if kind == "plan":
            self.plan = self.scheduler.plan(self.now)
        if kind == "preempt" and self.plan is not None and len(self.plan.sequences) > 1:
            self.scheduler.preempt(self.plan, [self.plan.sequences[a % len(self.plan.sequences)]], self.now)
        elif kind in ("cancel", "suspend") and inside:
            chosen = inside[a % len(inside)]
            if chosen in self.scheduler.running:
                self.commit()
            if kind == "cancel":
                self.scheduler.remove_all([chosen], self.now)
            elif chosen.state != "finished":
                self.scheduler.suspend([chosen], self.now)

    def add(self, prompt: int, answer: int, *, is_late: bool) -> None:
        self.arrived += 1
        seq = Sequence([0] * prompt, answer, id=str(self.arrived), arrived_at=self.now)
        seq.deadline = 0.0 if is_late else None
        expected = [max(self.now, self.ended) + after for after in step_by_step(self.scheduler, seq)]
        assert self.scheduler.add(seq) is not is_late
        assert seq.estimate == tuple(expected)

    def commit(self) -> None:
        """Let what was planned come out."""
        if self.plan is None:
            return
        self.now += 10 + sum(self.plan.counts)
        outputs = [1 if count == seq.pending else None for seq, count in zip(self.plan.sequences, self.plan.counts)]
        self.scheduler.commit(self.plan, outputs, self.now)
        self.plan, self.ended = None, self.now


KINDS = ["add", "add", "add", "refuse", "plan", "plan", "commit", "preempt", "cancel", "suspend"]


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.sampled_from([4, 64]))
@example(538, 3, 4)  # one leaves the batch and the next one joins, so that as many run and wait as before
def test_whatever_happened_since_the_last_arrival_the_estimate_is_that_of_the_whole_queue(
    seed: int, slots: int, budget: int
) -> None:
    served, chance = Served(slots, budget), random.Random(seed)
    for _ in range(150):
        served.act(chance.choice(KINDS), chance.randint(1, 6), chance.randint(1, 6))


def test_a_burst_goes_through_the_queue_once() -> None:
    served = Served(2, 64)
    asked: list[Sequence] = []
    served.scheduler.policy.cached_tokens = lambda seq: asked.append(seq) or 0  # type: ignore[func-returns-value]
    for _ in range(100):
        served.add(3, 4, is_late=False)
    assert len(asked) == 100

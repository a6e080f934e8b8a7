"""The lower bound on the mean program time, against the best of all schedules of tiny cases.

A schedule says before each step which calls compute; calls may pause, and the machine may wait. Prompts are computed whole, so
the true optimum may be lower than what is found here, but never lower than a bound.
"""

from __future__ import annotations

from itertools import combinations
from statistics import median

import numpy as np
import pytest

from client.workloads.programs import Call, joined
from costs.cost import Affine, Cost, Phases
from costs.steps import Step
from simulate import workloads
from simulate.best.programs import bounds
from simulate.rows import Rows


class Best:
    """A search through all schedules of a few calls."""

    def __init__(self, rows: Rows, cost: Cost, slots: int) -> None:
        self.calls, self.cost, self.slots = rows.calls or [], cost, slots
        self.prompt, self.output = rows.prompt.tolist(), rows.output.tolist()
        self.programs = list(dict.fromkeys(call.program for call in self.calls))
        self.seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        self.least = float("inf")
        none = len(self.calls)
        self._search((0,) * none, (0.0,) * none, 0.0)

    @property
    def mean(self) -> float:
        return self.least / len(self.programs)

    def _arrival(self, k: int, done: tuple[int, ...], end: tuple[float, ...]) -> float:
        call = self.calls[k]
        if done[k] == self.output[k] or any(done[p] < self.output[p] for p in call.after):
            return float("inf")
        return max((end[p] for p in call.after), default=call.at) + call.tool_s

    def _step(self, members: tuple[int, ...], done: tuple[int, ...]) -> Step:
        decodes = [self.prompt[k] + done[k] for k in members if done[k]]
        prompts = [self.prompt[k] for k in members if not done[k]]
        return Step(
            len(decodes), sum(decodes), len(prompts), sum(prompts), sum(p * (p + 1) / 2 for p in prompts),
            sum(p * p for p in prompts), max([*decodes, *prompts]), max([1, *prompts]),
            sum(decodes) + sum(p * p for p in prompts),
        )  # fmt: skip

    def _search(self, done: tuple[int, ...], end: tuple[float, ...], now: float) -> None:
        lasts: dict[str, float] = {}
        for k, call in enumerate(self.calls):
            last = (end[k] if done[k] == self.output[k] else now) - call.at
            lasts[call.program] = max(lasts.get(call.program, last), last)
        if sum(lasts.values()) >= self.least - 1e-12:
            return
        if list(done) == self.output:
            self.least = sum(lasts.values())
            return
        point, others = (now, *end), self.seen.setdefault(done, [])
        if any(all(a <= b for a, b in zip(other, point)) for other in others):
            return
        others.append(point)
        here = {k: at for k in range(len(self.calls)) if (at := self._arrival(k, done, end)) < float("inf")}
        for start in sorted({now, *(at for at in here.values() if at > now)}):
            ready = [k for k, at in here.items() if at <= start]
            for size in range(min(self.slots, len(ready)), 0, -1):
                for members in combinations(ready, size):
                    over = start + self.cost.seconds(self._step(members, done))
                    after, ends = list(done), list(end)
                    for k in members:
                        after[k] += 1
                        ends[k] = over if after[k] == self.output[k] else ends[k]
                    self._search(tuple(after), tuple(ends), over)


def tiny(rng: np.random.Generator) -> tuple[Rows, Cost, int]:
    """Draw one to three programs with at most eight answer tokens, a law and a number of slots."""
    while True:
        programs, at = [], 0.0
        for _ in range(count := int(rng.integers(1, 4))):
            calls = []
            for i in range(int(rng.integers(1, 4 if count < 3 else 3))):
                few = rng.integers(0, i, rng.integers(1, 3)) if i and rng.random() < 0.85 else ()
                after = tuple(sorted({int(parent) for parent in few}))
                tool = float(rng.integers(0, 6)) if after else 0.0
                on = after[-1] if after and rng.random() < 0.5 else None
                calls.append(Call(after, tool, on, int(rng.integers(1, 4)), int(rng.integers(1, 4))))
            programs.append((at, calls))
            at += float(rng.integers(0, 5))
        if sum(call.answer for _, calls in programs for call in calls) <= 8:
            break
    limits = ((1, 5), (0, 3), (0, 2), (0, 2), (1, 4))
    base, row, token, more, start = (float(rng.integers(low, high)) for low, high in limits)
    laws: tuple[Cost, ...] = (
        Affine(base=base, row=row, token=token, prefill=more),
        Phases(base=base, row=row, start=start, token=token, request=more),
    )
    return workloads.of_calls(joined(programs), instructions=0), laws[int(rng.integers(2))], int(rng.integers(1, 4))


def shares(number: int, seed: int) -> list[float]:
    """Return the bound over the optimum in random cases, never above 1."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        rows, cost, slots = tiny(rng)
        loop = rows.sequences()
        found.append(bounds(loop, loop.sequences, cost, slots)[0] / Best(rows, cost, slots).mean)  # type: ignore[attr-defined,arg-type]
        assert found[-1] <= 1 + 1e-9, (rows.calls, cost, slots)
    return found


def test_the_bound_is_never_above_the_optimum_and_near_it() -> None:
    assert median(shares(150, 1)) > 0.9


@pytest.mark.full
def test_the_bound_is_never_above_the_optimum_in_ten_thousand_cases() -> None:
    assert median(shares(10_000, 2)) > 0.9

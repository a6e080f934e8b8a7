"""The best that is possible for a few requests: the least latency or makespan of all schedules, by branch and bound.

A schedule says before each step which sequences compute; they may pause, and the machine may wait. Prompts are computed in
one step each. The search goes through what the requests have so far, the time, and the sum that is minimized; of two ways to
the same point, one that is both later and worse is dropped, and so is one that the bounds say cannot win. This module must
not know policies.
"""

from __future__ import annotations

import collections.abc as abc
from itertools import accumulate, combinations
from math import prod

import numpy as np

from costs.cost import Cost, Host
from costs.steps import Step
from scheduling.sequence import Sequence
from simulate.best.one_machine import completions
from simulate.best.shares import Shares, shares_of

MOST_REQUESTS = 8
MOST_POINTS = 3000  # combinations of what the requests have so far; more take too long


def is_small(sequences: abc.Sequence[Sequence]) -> bool:
    """Return whether the search is over within about a second."""
    points = prod(max(1, s.max_tokens) + 1 for s in sequences)
    return 1 <= len(sequences) <= MOST_REQUESTS and points <= MOST_POINTS


def seconds_left(shares: Shares, prompt: int, output: int) -> list[tuple[float, float]]:
    """Return the least seconds that a request still takes, shared with others and alone, by the tokens that it has."""
    first = shares.prompt + shares.token * prompt + shares.pair * prompt * (prompt + 1) / 2
    begun = [(left * shares.row, left * shares.alone_row) for left in range(output)]
    return [(first + begun[-1][0], shares.alone(prompt, 1) + begun[-1][1]), *reversed(begun)]


class Optimum:
    """The search for one list of requests; times are seconds."""

    def __init__(self, sequences: abc.Sequence[Sequence], cost: Cost, slots: int, host: Host | None = None) -> None:
        self.cost, self.slots, self.host = cost, slots, host or Host()
        self.arrival = [s.arrived_at for s in sequences]
        self.prompt = [len(s.prompt_ids) for s in sequences]
        self.constrained = [s.constrained for s in sequences]
        self.output = [max(1, s.max_tokens) for s in sequences]
        shares = shares_of(cost, min(slots, len(sequences)), self.host)[0]
        self._rest = [seconds_left(shares, *row) for row in zip(self.prompt, self.output)]

    def least_mean(self) -> float:
        """Return the least mean latency."""
        return self.least_weighted([1.0] * len(self.arrival))

    def least_weighted(self, weights: abc.Sequence[float]) -> float:
        """Return the least mean of weight times latency."""
        return (self._least(weights) + sum(weights) * (self.host.alpha0 + self.host.alpha1)) / len(weights)

    def least_makespan(self) -> float:
        """Return the least time from the first arrival to the last answer."""
        return self._least() - min(self.arrival) + self.host.alpha0 + self.host.alpha1

    def _least(self, weights: abc.Sequence[float] = ()) -> float:
        """Return the least sum of weight times latency, or without weights the earliest last end."""
        self._weights = weights
        self.kinds = [*zip(self.arrival, self.prompt, self.output, self.constrained, weights or self.arrival)]
        self._best = float("inf")
        self._seen: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        self._search((0,) * len(self.arrival), min(self.arrival), 0.0)
        return self._best

    def _price(self, j: int, end: float) -> float:
        """Return what a request that ends then adds to the sum."""
        return self._weights[j] * (end - self.arrival[j]) if self._weights else 0.0

    def _search(self, done: tuple[int, ...], now: float, total: float) -> None:
        waiting = [j for j, tokens in enumerate(done) if tokens < self.output[j]]
        if not waiting:
            self._best = min(self._best, total if self._weights else now)
            return
        if self._is_dominated(done, now, total) or total + self._least_rest(done, waiting, now) >= self._best - 1e-12:
            return
        for start in sorted({now, *(self.arrival[j] for j in waiting if self.arrival[j] > now)}):
            for members in self._choices(done, [j for j in waiting if self.arrival[j] <= start]):
                end = start + self.cost.seconds(self._step(done, members)) + self.host.seconds(len(members))
                after = list(done)
                for j in members:
                    after[j] += 1
                finished = sum(self._price(j, end) for j in members if after[j] == self.output[j])
                self._search(tuple(after), end, total + finished)

    def _choices(self, done: tuple[int, ...], ready: list[int]) -> list[tuple[int, ...]]:
        """Return which sequences may compute together; sequences that are alike are interchangeable, so one choice is enough."""
        choices: dict[tuple[tuple[float, ...], ...], tuple[int, ...]] = {}
        ready = sorted(ready, key=lambda j: self.output[j] - done[j])
        for size in range(min(self.slots, len(ready)), 0, -1):
            for members in combinations(ready, size):
                choices.setdefault(tuple(sorted((*self.kinds[j], done[j]) for j in members)), members)
        return list(choices.values())

    def _step(self, done: tuple[int, ...], members: tuple[int, ...]) -> Step:
        decodes = [self.prompt[j] + done[j] for j in members if done[j]]
        prompts = [self.prompt[j] for j in members if not done[j]]
        return Step(
            len(decodes), sum(decodes), len(prompts), sum(prompts), sum(p * (p + 1) / 2 for p in prompts),
            sum(p * p for p in prompts), max([*decodes, *prompts]), max([1, *prompts]), sum(decodes) + sum(p * p for p in prompts),
            sum(self.constrained[j] for j in members),
        )  # fmt: skip

    def _least_rest(self, done: tuple[int, ...], waiting: list[int], now: float) -> float:
        """Return the least that the requests that are not done add to the sum, or the earliest time of the last end."""
        rest = [self._rest[j][done[j]] for j in waiting]
        starts = [max(now, self.arrival[j]) for j in waiting]
        soonest = [start + seconds for start, (_, seconds) in zip(starts, rest)]
        alone = sum(self._price(j, end) for j, end in zip(waiting, soonest))
        if max(starts) == now:  # all are here, so the shortest goes first
            together = [now + seconds for seconds in accumulate(sorted(seconds for seconds, _ in rest))]
        else:
            together = completions(np.array(starts), np.array([seconds for seconds, _ in rest])).tolist()
        if not self._weights:
            return max(together[-1], *soonest)
        heaviest = sorted((self._weights[j] for j in waiting), reverse=True)
        ends = sum(weight * end for weight, end in zip(heaviest, together))
        return max(alone, ends - sum(self._weights[j] * self.arrival[j] for j in waiting))

    def _is_dominated(self, done: tuple[int, ...], now: float, total: float) -> bool:
        """Return whether the same point was reached no later with no larger sum; otherwise note this way."""
        others = self._seen.setdefault(done, [])
        if any(at <= now and cost <= total for at, cost in others):
            return True
        others[:] = [(at, cost) for at, cost in others if not (now <= at and total <= cost)]
        others.append((now, total))
        return False

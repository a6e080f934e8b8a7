"""A run of millions of requests in a memory that does not grow with them: each leaves only its part of a few sums.

This module must not know where requests come from, or how figures are printed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from client.report.measure import named_ms, statistics_ms
from costs.cost import Cost, Host
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import Run, Simulation

WIDTH = 1e-3  # of a bin: the logarithms of its bounds differ by so much


class Spread:
    """The mean and the standard deviation of many numbers, and their percentiles, which are off by 0.05 % at most."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self._bins = Counter[float]()

    def add(self, number: float) -> None:
        """Count one more number, 0 or more."""
        self.count += 1
        off = number - self.mean
        self.mean += off / self.count
        self._squares += off * (number - self.mean)  # Welford, 1962: no difference of two large sums
        self._bins[round(math.log(number) / WIDTH) if number > 0 else -math.inf] += 1

    def percentile(self, percent: float) -> float:
        """Return a percentile, between two numbers where it lies between their places, as numpy does."""
        place = percent / 100 * (self.count - 1)
        below = self._number(int(place))
        return below + (self._number(math.ceil(place)) - below) * (place - int(place))

    def _number(self, place: int) -> float:
        """Return the number at a place in ascending order, from 0."""
        for each in sorted(self._bins):
            place -= self._bins[each]
            if place < 0:
                return math.exp(each * WIDTH)
        raise IndexError("there are fewer numbers")

    def statistics_ms(self, name: str) -> dict[str, float | None]:
        """Return what `measure.statistics_ms` does; the numbers are seconds."""
        if not self.count:
            return statistics_ms(name, ())
        p50, p90, p99 = map(self.percentile, (50, 90, 99))
        deviation = math.sqrt(self._squares / self.count)
        return named_ms(name, [1000 * n for n in (self.mean, p50, deviation, p50, p90, p99)])


class Brief(Simulation):
    """A simulation of arrivals in order, whose result has no sequences, and no times between tokens."""

    def __init__(self, scheduler: Scheduler, arrivals: Iterable[Sequence], cost: Cost, host: Host) -> None:
        self._later = iter(arrivals)
        super().__init__(scheduler, islice(self._later, 1000), cost, host)  # of which 1,000 are known ahead
        self.result = Run(self.result.policy, [], host, began=self.result.began)
        self.requests = self.answered = 0
        self._inside: dict[str, Sequence] = {}  # by id
        self._sums = Counter[str]()
        self._seconds = {name: Spread() for name in ("ttft", "tpot", "e2el", "queue")}

    def add(self, seq: Sequence) -> None:
        for later in islice(self._later, 1):
            later.arrived_at += self.host.alpha0
            self.arrivals.append(later)
        self._inside[seq.id] = seq
        self.requests += 1
        self._sums["asked"] += len(seq.prompt_ids)
        if not self.scheduler.add(seq):
            self.refuse([seq])

    def refuse(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            del self._inside[seq.id]

    def left(self, plan: Plan, left: list[tuple[str, str]]) -> None:
        del self.result.gaps[:]
        self._sums["preemptions"] += len(plan.preempted)
        for id, _ in left:
            self._finish(self._inside.pop(id))

    def _finish(self, seq: Sequence) -> None:
        sent, sums, tokens = seq.arrived_at - self.host.alpha0, self._sums, len(seq.output_ids)
        queue, ttft, e2el = ((at or 0.0) - sent for at in (seq.scheduled_at, seq.first_token_at, seq.finished_at))
        self.answered += 1
        sums["read"] += len(seq.prompt_ids)
        sums["made"] += tokens
        sums["cached"] += seq.cached
        e2el += self.host.alpha1
        times = {"ttft": ttft, "e2el": e2el, "queue": queue}
        if tokens > 1:
            times["tpot"] = (e2el - ttft) / (tokens - 1)
        for name, seconds in times.items():
            self._seconds[name].add(seconds)

    def put_into(self, numbers: dict[str, Any]) -> None:
        """Replace the figures of a `result.result` that need sequences by those of the sums."""
        run, done, sums, failed = self.result, self.answered, self._sums, self.requests - self.answered
        numbers |= {"num_prompts": self.requests, "unsent": 0, "max_concurrent_requests": None}
        numbers |= {"completed": done, "failed": failed, "failures": {"refused": failed} if failed else {}}
        numbers["simulation"] |= {
            "mean_joined": done / run.batches if run.batches else None,
            "mean_queue_ms": 1000 * self._seconds["queue"].mean if done else None,
            "refused": failed,
            "preemptions": sums["preemptions"],
            "cached": sums["cached"] / max(sums["asked"], 1),
        }
        if not done:
            return
        totals = {"request": done, "output": sums["made"], "total_token": sums["made"] + sums["read"]}
        numbers |= {f"{name}_throughput": total / run.makespan for name, total in totals.items()}
        numbers |= {"duration": run.makespan, "total_input_tokens": sums["read"], "total_output_tokens": sums["made"]}
        for name, spread in self._seconds.items():
            numbers |= spread.statistics_ms(name)

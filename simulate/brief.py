"""A run of millions of requests, each of which leaves four times (32 bytes) and its part of a few sums.

This module must not know where requests come from, or how figures are printed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from client.report.measure import statistics_ms
from costs.cost import Cost, Host
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import Run, Simulation


class Brief(Simulation):
    """A simulation of arrivals in order, whose result has no sequences, and no times between tokens."""

    def __init__(self, scheduler: Scheduler, arrivals: Iterable[Sequence], cost: Cost, host: Host) -> None:
        self._later = iter(arrivals)
        super().__init__(scheduler, islice(self._later, 1000), cost, host)  # of which 1,000 are known ahead
        self.result = Run(self.result.policy, [], host, began=self.result.began)
        self.requests = self.answered = 0
        self._inside: dict[str, Sequence] = {}  # by id
        self._sums = Counter[str]()
        self._seconds = {name: array("d") for name in ("ttft", "tpot", "e2el", "queue")}

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
            self._seconds[name].append(seconds)

    def put_into(self, numbers: dict[str, Any]) -> None:
        """Replace the figures of a `result.result` that need sequences by those of the sums."""
        run, done, sums, failed = self.result, self.answered, self._sums, self.requests - self.answered
        numbers |= {"num_prompts": self.requests, "unsent": 0, "max_concurrent_requests": None}
        numbers |= {"completed": done, "failed": failed, "failures": {"refused": failed} if failed else {}}
        for name, seconds in self._seconds.items():
            numbers |= statistics_ms(name, seconds)
        numbers["simulation"] |= {
            "mean_joined": done / run.batches if run.batches else None,
            "mean_queue_ms": numbers["mean_queue_ms"],
            "refused": failed,
            "preemptions": sums["preemptions"],
            "cached": sums["cached"] / max(sums["asked"], 1),
        }
        if not done:
            return
        totals = {"request": done, "output": sums["made"], "total_token": sums["made"] + sums["read"]}
        numbers |= {f"{name}_throughput": total / run.makespan for name, total in totals.items()}
        numbers |= {"duration": run.makespan, "total_input_tokens": sums["read"], "total_output_tokens": sums["made"]}

"""A run of millions of requests: each is made shortly before it arrives, and leaves only a few numbers.

This module must not know where requests come from, or how figures are printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from client.report.measure import statistics_ms
from costs.cost import Cost, Host
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.fleet.fleet_run import FleetRun
from simulate.result import tpots
from simulate.simulator import Simulation


class Brief(Simulation):
    """A simulation of arrivals in order, whose result has columns in place of sequences, and no times between tokens."""

    def __init__(self, scheduler: Scheduler, arrivals: Iterable[Sequence], cost: Cost, host: Host) -> None:
        self._later = iter(arrivals)
        super().__init__(scheduler, islice(self._later, 1000), cost, host)  # of which 1,000 are known ahead
        self.result = self.columns = FleetRun(self.result.policy, [], host, began=self.result.began)
        self._inside: dict[str, tuple[int, Sequence]] = {}  # by id, with its place in the columns
        self._preemptions = 0

    def add(self, seq: Sequence) -> None:
        for later in islice(self._later, 1):
            later.arrived_at += self.host.alpha0
            self.arrivals.append(later)
        self._inside[seq.id] = self.columns.requests, seq
        self.columns.arrive(seq, 0)
        if not self.scheduler.add(seq):
            self.refuse([seq])

    def refuse(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            del self._inside[seq.id]

    def left(self, plan: Plan, left: list[tuple[str, str]]) -> None:
        del self.columns.gaps[:]
        self._preemptions += len(plan.preempted)
        for id, _ in left:
            self.columns.finish(*self._inside.pop(id))

    def put_into(self, numbers: dict[str, Any]) -> None:
        """Replace the figures of a `result.result` that need sequences by those of the columns."""
        run, done, tokens = self.columns, self.columns.answered, self.columns.tokens
        made, read, failed = int(tokens.sum()), int(run.of_answered("prompt").sum()), run.requests - done
        numbers |= {"completed": done, "failed": failed, "failures": {"refused": failed} if failed else {}}
        numbers |= {"unsent": 0, "max_concurrent_requests": None}
        numbers["simulation"] |= {"preemptions": self._preemptions, "cached": run.hit_rate}
        if not done:
            return
        totals = {"request": done, "output": made, "total_token": made + read}
        numbers |= {f"{name}_throughput": total / run.makespan for name, total in totals.items()}
        numbers |= {"duration": run.makespan, "total_input_tokens": read, "total_output_tokens": made}
        series = {"ttft": run.ttft, "tpot": tpots(run)[tokens > 1], "e2el": run.latency, "queue": run.waiting}
        for name, seconds in series.items():
            numbers |= statistics_ms(name, seconds)

"""A recorded run once more, with the step times that were measured: does the scheduler decide the same?

Arrivals and Iteration records of a server (or of a simulation) go in; each step is planned again at the time at which
it began, and committed when it had ended. It must not know where the records come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from scheduling.iteration import Iteration
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence


@dataclass(frozen=True)
class Agreement:
    """How many steps had the same members, and the first that had not, in words."""

    steps: int
    same: int
    first_difference: str = ""

    @property
    def share(self) -> float:
        return self.same / self.steps if self.steps else 1.0


def replay(scheduler: Scheduler, arrivals: Iterable[Sequence], records: Rows[Iteration]) -> Agreement:
    """Plan each recorded step again; compare who joined, and who computed how many tokens in which phase.

    `arrived_at` and the records are on one clock. The replay stops where the scheduler has nothing to do.
    """
    pending = deque(sorted(arrivals, key=lambda seq: seq.arrived_at))
    same, difference = 0, ""
    for record in records:
        while pending and pending[0].arrived_at <= record.t:
            scheduler.add(pending.popleft())
        plan = scheduler.plan(record.t)
        if plan is None:
            return Agreement(len(records), same, difference or f"step {record.n}: no request runs")
        outputs = [0 if n == s.pending else None for s, n in zip(plan.sequences, plan.counts)]
        found = scheduler.commit(plan, outputs, record.t + record.seconds)
        ours, theirs = _decisions(found), _decisions(record)
        if ours == theirs:
            same += 1
        elif not difference:
            difference = f"step {record.n} at {record.t:g}: recorded {theirs}, replayed {ours}"
    return Agreement(len(records), same, difference)


def _decisions(record: Iteration) -> tuple[list[str], list[tuple[str, str, int]]]:
    return sorted(record.joined), sorted((m.id, m.phase, m.tokens) for m in record.members)

"""Replay a recorded run with the step times that were measured: does the scheduler decide the same?

Arrivals and Iteration records of a server (or of a simulation) go in; each step is planned again at the time at which
it began, and committed when it had ended. It must not know where the records come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from scheduling.driver import Driver, tokens_due
from scheduling.iteration import Iteration, Plan
from scheduling.scheduler import Output, Scheduler
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


class Replay(Driver):
    """Plans each recorded step at the time at which it began, and commits it at the time at which it ended."""

    def __init__(self, scheduler: Scheduler, arrivals: Iterable[Sequence]) -> None:
        super().__init__(scheduler, arrivals)
        self.ends = 0.0
        self.iteration: Iteration | None = None

    def drain(self) -> None:
        """Do nothing: the server could not know that no request would follow."""

    def compute(self, plan: Plan) -> list[Output]:
        self.now = self.ends
        return tokens_due(plan)

    def record(self, iteration: Iteration) -> None:
        self.iteration = iteration

    def repeat(self, record: Iteration) -> Iteration | None:
        """Return the step that the scheduler runs when this one was recorded, None if it runs none."""
        self.now, self.ends, self.iteration = record.t, record.t + record.seconds, None
        self.turn()
        return self.iteration


def replay(scheduler: Scheduler, arrivals: Iterable[Sequence], records: Rows[Iteration]) -> Agreement:
    """Plan each recorded step again; compare which requests joined, and how many tokens each computed in which phase.

    `arrived_at` and the records are on one clock. The replay stops where the scheduler has nothing to do.
    """
    driver = Replay(scheduler, arrivals)
    same, difference = 0, ""
    for record in records:
        found = driver.repeat(record)
        if found is None:
            return Agreement(len(records), same, difference or f"step {record.n}: no request runs")
        ours, theirs = _decisions(found), _decisions(record)
        if ours == theirs:
            same += 1
        elif not difference:
            difference = f"step {record.n} at {record.t:g}: recorded {theirs}, replayed {ours}"
    return Agreement(len(records), same, difference)


def _decisions(record: Iteration) -> tuple[list[str], list[tuple[str, str, int]]]:
    return sorted(record.joined), sorted((m.id, m.phase, m.tokens) for m in record.members)

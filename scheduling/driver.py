"""Drive a scheduler over a list of arrivals, on a clock that only its steps and its sleep move.

The simulator, the law checker and the tests are such drivers. A subclass says what a step computes and how long it
takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from scheduling.advance import TokenRun, run_of
from scheduling.iteration import Iteration, Plan
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import UNKNOWN_TOKEN, Sequence


class Driver:
    """Deliver arrivals, run steps, and sleep while the policy schedules none, until all sequences have left.

    Conventions of time: a sequence is delivered when its `arrived_at` is not after `now`, ties in the order given. All
    tokens of a step appear at its end, and what finishes frees its slot at that instant.
    """

    def __init__(self, scheduler: Scheduler, arrivals: Iterable[Sequence]) -> None:
        self.scheduler = scheduler
        self.arrivals = deque(sorted(arrivals, key=lambda seq: seq.arrived_at))
        self.now: float = 0

    def run(self) -> None:
        """Run until all sequences have left."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Run one step, or sleep until the next event; return False when nothing is left to do."""
        self.deliver()
        plan = self.scheduler.plan(self.now)
        if self.scheduler.refused:
            self.refuse(self.scheduler.refused)
        if plan is not None:
            self.serve(plan)
        elif self.arrivals or not self.scheduler.is_idle:
            self.sleep()
        else:
            return False
        return True

    def deliver(self) -> None:
        """Add the sequences that have arrived by now; after the last one that is known, drain: a later `add` revokes it."""
        while self.arrivals and self.arrivals[0].arrived_at <= self.now:
            self.add(self.arrivals.popleft())
        if not self.arrivals:
            self.drain()

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)

    def refuse(self, sequences: list[Sequence]) -> None:
        """Take note of sequences that were turned away after they had waited, before the step or the sleep."""

    def drain(self) -> None:
        self.scheduler.drain()

    def serve(self, plan: Plan) -> None:
        """Compute a step and commit it."""
        outputs = self.compute(plan)
        self.record(self.scheduler.commit(plan, outputs, self.now))

    def compute(self, plan: Plan) -> list[Output]:
        """Return the outputs of a step, and advance `now` to its end."""
        raise NotImplementedError

    def record(self, iteration: Iteration) -> None:
        """Take note of a step that was committed."""

    def next_event(self) -> float:
        """Return the time of the next arrival or of the policy's deadline, infinity if neither will come."""
        wake_at = self.scheduler.wake_at(self.now)
        arrival = self.arrivals[0].arrived_at if self.arrivals else inf
        return arrival if wake_at is None else min(arrival, wake_at)

    def sleep(self) -> None:
        """Advance `now` to the next event; called while no sequence runs and the policy admits none."""
        self.now = self.next_event()


def tokens_due(plan: Plan) -> list[Output]:
    """Return UNKNOWN_TOKEN for each sequence that computes all its pending tokens, None for the others.

    A draft is right if it is UNKNOWN_TOKEN, too.
    """
    known = plan.decoding
    due: list[Output] = [UNKNOWN_TOKEN] * known
    due += [  # `pending` written out, as calls of it would take longer than all the rest
        UNKNOWN_TOKEN if count >= len(seq.prompt_ids) + len(seq.output_ids) - seq.computed else None
        for seq, count in zip(plan.sequences[known:], plan.counts[known:])
    ]
    for i, drafts in enumerate(plan.drafts):
        if drafts:
            due[i] = TokenRun(run_of(drafts, [UNKNOWN_TOKEN] * (len(drafts) + 1)))
    return due

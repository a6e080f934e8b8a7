"""One replica of a fleet: a scheduler, and the steps that it computes between two events.

Equal decode steps are one stretch with one event at its end. A request that arrives meanwhile cuts it after the step in
which it arrives. This module must not know other replicas, routers, or the fleet's queue of events.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left

from costs.cost import Cost, Host
from routing.autoscalers import Load
from scheduling.driver import tokens_due
from scheduling.fast_forward import commit_equal_steps, fast_forward, identical_steps_ahead
from scheduling.iteration import Iteration, Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import one_more
from simulate.stretch import gaps_between, gaps_of_step, step_ends, step_seconds


class Replica:
    """A scheduler on the fleet's clock. Times between tokens and records of steps are appended to `gaps` and `records`, if given."""

    def __init__(
        self, number: int, scheduler: Scheduler, cost: Cost, host: Host, gaps: array[float] | None = None,
        records: list[Iteration] | None = None,
    ) -> None:  # fmt: skip
        scheduler.record = records is not None
        self.number = number
        self.name = f"replica-{number}"
        self.scheduler = scheduler
        self.place = -1  # in the pool that gets new requests; -1: not in it
        self.version = 0  # of its end: an event with another one is out of date
        self.steps = self.batches = 0
        self.busy = 0.0
        self.since, self.until = 0.0, math.inf  # when it began to cost something, and when it was gone
        self._cost, self._host, self._gaps, self._records = cost, host, gaps, records
        self._plan: Plan | None = None
        self._ends: list[float] = []
        self._seconds: list[float] = []
        self._idle_since = 0.0
        self._looks_at = -1.0  # when it looks for the requests that found it idle
        self._fruitless = 0

    @property
    def is_computing(self) -> bool:
        return self._plan is not None

    @property
    def end(self) -> float:
        """When the steps end that it computes."""
        return self._ends[-1]

    def begin(self, now: float) -> bool:
        """Begin the next step, and the equal ones after it; return False if there is none."""
        plan = self.scheduler.plan(now)
        if plan is None:
            self._idle_since = now
            return False
        self._fruitless = 0 if plan.sequences else one_more(self._fruitless, self.scheduler, now)
        self.batches += bool(plan.joined)
        most = identical_steps_ahead(self.scheduler, plan) if self._records is None else 1
        seconds = step_seconds(self._cost, self._host, plan)
        self._ends, self._seconds = [now + seconds], [seconds]
        if most > 1:
            self._ends, self._seconds, _ = step_ends(self._cost, self._host, plan, seconds, now, most)
        self._plan = plan
        self.version += 1
        return True

    def catch_up(self, now: float) -> None:
        """Let the steps pass that ended before `now`, except the last of a stretch."""
        if len(self._ends) > 1:
            passed = min(bisect_left(self._ends, now), len(self._ends) - 1)
            if passed:
                self._pass(passed)

    def cut(self, now: float) -> bool:
        """End a stretch with the step that is computed at `now`; return whether it ends earlier than before."""
        self.catch_up(now)
        if len(self._ends) < 2:
            return False
        # The policy may treat the step after an arrival differently, so only the current step is certain.
        del self._ends[1:], self._seconds[1:]
        self.version += 1
        return True

    def commit(self) -> list[Sequence]:
        """End the stretch; return the sequences that left."""
        plan, ends = self._plan, self._ends
        assert plan is not None
        self._plan, self._ends = None, []
        self.steps += len(ends)
        self.busy += sum(self._seconds)
        if len(ends) > 1:
            if self._gaps is not None:
                self._gaps.extend(gaps_between(plan, ends))
            return commit_equal_steps(self.scheduler, plan, ends)
        outputs, now = tokens_due(plan), ends[0]
        if self._gaps is not None:
            self._gaps.extend(gaps_of_step(plan, outputs, now))
        if self._records is None:
            return self.scheduler.take_in(plan, outputs, now)[1]
        inside = self.scheduler.running[:]
        self._records.append(self.scheduler.commit(plan, outputs, now))
        return [seq for seq in inside if seq.state == "finished" and seq.finished_at == now]

    def _pass(self, count: int) -> None:
        """Let the first steps of a stretch pass."""
        assert self._plan is not None
        ends = self._ends[:count]
        if self._gaps is not None:
            self._gaps.extend(gaps_between(self._plan, ends))
        fast_forward(self.scheduler, self._plan, ends)
        self.steps += count
        self.busy += sum(self._seconds[:count])
        del self._ends[:count], self._seconds[:count]

    def looks_at(self, at: float, was_empty: bool) -> float | None:
        """Return when it looks for what arrives at `at`, as it polls; None if it looks anyway."""
        if self.is_computing or at <= self._looks_at:
            return None
        poll = self._host.poll
        if poll and was_empty:
            at = self._idle_since + poll * math.ceil((at - self._idle_since) / poll)
        self._looks_at = at
        return at

    def wakes_at(self, now: float) -> float | None:
        """Return when its policy wants to be asked again; PolicyHangs if that leads to nothing."""
        at = self.scheduler.wake_at(now)
        if at is None or at == math.inf:
            return None
        self._fruitless = one_more(self._fruitless, self.scheduler, now)
        return max(at, math.nextafter(now, math.inf))

    def load(self, now: float) -> Load:
        """Return what an autoscaler knows of it."""
        self.catch_up(now)
        scheduler, pages = self.scheduler, self.scheduler.pages
        inside = [*scheduler.waiting, *scheduler.running]
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots=scheduler.policy.max_batch_size,
            kv_used=pages.used / pages.total if pages else 0.0,
            kv_tokens=pages.total * pages.page_size if pages else 0,
            waiting_tokens=sum(seq.total for seq in scheduler.waiting),
            prefill_tokens=sum(len(seq.prompt_ids) - seq.computed for seq in inside if not seq.output_ids),
        )

"""The server's scheduler on a virtual clock: arrivals in, records out, the same from every run.

One engine needs no event heap: the next event is the end of this step or, when nobody runs, the next arrival or the
time at which the policy wants to be asked again. It must not know what a policy decides, or how a cost was fitted.

Decode steps in which nothing can change but the clock are gone through without a plan for each; the result is equal
bit for bit to that of asking every time (`fast_forward=False`, which records of single steps imply).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduling.iteration import Iteration, Plan
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate.costs import Cost, Host, Step

FRUITLESS = 100_000  # turns without a step or an arrival after which a policy is said to hang


class PolicyHangs(RuntimeError):
    """A policy lets a request wait forever."""


def waits_forever(scheduler: Scheduler) -> PolicyHangs:
    """Return the error for a policy that admits nobody although nothing else will happen."""
    return PolicyHangs(
        f"{scheduler.policy.name} admits no request, with {len(scheduler.waiting)} in its queue, none running and "
        "none left to arrive. Return a time from deadline(), or admit one"
    )


def asks_forever(scheduler: Scheduler, now: float) -> PolicyHangs:
    """Return the error for a policy that is woken again and again, and admits nobody."""
    return PolicyHangs(
        f"{scheduler.policy.name} was called {FRUITLESS:,} times in a row by {now:g} s and admitted no request. "
        "Return a later time from deadline(), or admit one"
    )


@dataclass
class Run:
    """What happened: the sequences with their times, and the sums of the steps. Times are seconds.

    `gaps` are all times between two tokens of one sequence. `batches` counts the steps at which somebody joined.
    """

    policy: str
    sequences: list[Sequence]
    host: Host = field(default_factory=Host)
    iterations: list[Iteration] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    steps: int = 0
    batches: int = 0
    busy: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def done(self) -> list[Sequence]:
        """The sequences that have their answer, in order of arrival."""
        return [seq for seq in self.sequences if seq.finish_reason in ("length", "stop")]

    @property
    def arrival(self) -> np.ndarray:
        return np.array([seq.arrived_at for seq in self.done]) - self.host.alpha0

    @property
    def latency(self) -> np.ndarray:
        """Seconds from arrival to the end of the answer."""
        return np.array([seq.finished_at for seq in self.done]) + self.host.alpha1 - self.arrival

    @property
    def ttft(self) -> np.ndarray:
        """Seconds from arrival to the first token."""
        return np.array([seq.first_token_at for seq in self.done]) - self.arrival

    @property
    def waiting(self) -> np.ndarray:
        """Seconds from arrival to admission."""
        return np.array([seq.scheduled_at for seq in self.done]) - self.arrival

    @property
    def tokens(self) -> np.ndarray:
        return np.array([len(seq.output_ids) for seq in self.done])

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last answer."""
        return self.ended + self.host.alpha1 - self.began

    @property
    def throughput(self) -> float:
        """Output tokens a second over the makespan."""
        return float(self.tokens.sum() / self.makespan)


def simulate(
    scheduler: Scheduler,
    arrivals: Iterable[Sequence],
    cost: Cost,
    host: Host | None = None,
    *,
    records: bool = False,
    fast_forward: bool = True,
) -> Run:
    """Serve all arrivals and return the run; with `records`, the Iteration of each step too.

    `arrived_at` of a sequence is when it was sent; while the run lasts it is `host.alpha0` later, when it is seen.
    Raises PolicyHangs when the policy will never let those who wait join.
    """
    return Simulation(scheduler, arrivals, cost, host or Host(), records, fast_forward).run()


class Simulation:
    """The state of one run."""

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Iterable[Sequence],
        cost: Cost,
        host: Host,
        records: bool,
        fast_forward: bool,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.host = host
        self.records = records
        ordered = sorted(arrivals, key=lambda seq: seq.arrived_at)  # stable: ties as submitted
        self.result = Run(scheduler.policy.name, ordered, host)
        if ordered:
            self.result.began = ordered[0].arrived_at
        for seq in ordered:
            seq.arrived_at += host.alpha0
        self.now: float = 0
        self._next = 0  # index of the next arrival
        self._fruitless = 0
        self._arrivals = array("d", [seq.arrived_at for seq in ordered] + [math.inf])
        scheduler.record = records
        self._listens = type(scheduler.policy).on_token is not Policy.on_token
        self._fast_forward = fast_forward and not records

    def run(self) -> Run:
        """Take in, plan, compute, until everybody has left."""
        scheduler, result = self.scheduler, self.result
        while True:
            self._take_in()
            plan = scheduler.plan(self.now)
            if plan is None:
                if self._next == len(result.sequences) and scheduler.is_idle:
                    break
                self._sleep()
                continue
            self._fruitless = 0
            result.batches += bool(plan.joined)
            if not (self._fast_forward and self._go_through(plan)):
                self._compute(plan)
        result.ended = self.now
        return result

    def _take_in(self) -> None:
        """Let everybody wait who has arrived by now."""
        while self._arrivals[self._next] <= self.now:
            self.scheduler.add(self.result.sequences[self._next])
            self._next += 1
            if self._next == len(self.result.sequences):
                self.scheduler.drain()

    def _sleep(self) -> None:
        """Let time pass to the next arrival or to when the policy wants to be asked again."""
        scheduler = self.scheduler
        wake_at = scheduler.wake_at(self.now)
        until = min(self._arrivals[self._next], math.inf if wake_at is None else wake_at)
        if until == math.inf:
            raise waits_forever(scheduler)
        self._fruitless += 1
        if self._fruitless > FRUITLESS:
            raise asks_forever(scheduler, self.now)
        if until <= self.now:  # rounding: oldest + delay <= now, while now - oldest < delay
            until = math.nextafter(self.now, math.inf)
        if self.host.poll and not scheduler.waiting:
            until = self.now + self.host.poll * math.ceil((until - self.now) / self.host.poll)
        self.now = until

    def _compute(self, plan: Plan) -> None:
        """Take the time of one step and hand out its tokens."""
        result = self.result
        outputs: list[Output] = [0 if count == seq.pending else None for seq, count in zip(plan.sequences, plan.counts)]
        due = sum(1 for output in outputs if output is not None)
        seconds = self.cost(plan) + self.host.seconds(due)
        self.now += seconds
        now, gaps = self.now, result.gaps
        for seq, output in zip(plan.sequences, outputs):
            if output is not None and seq.last_token_at is not None:
                gaps.append(now - seq.last_token_at)
        result.steps += 1
        result.busy += seconds
        iteration = self.scheduler.commit(plan, outputs, now)
        if self.records:
            result.iterations.append(iteration)

    def _go_through(self, plan: Plan) -> bool:
        """Compute this plan and those after it that must be equal, short of somebody's last token; False if none is."""
        steps = self.scheduler.identical_steps_ahead(plan) - 1
        if steps < 1:
            return False
        self._book(plan, self._turn(plan, steps))
        return True

    def _turn(self, plan: Plan, steps: int) -> int:
        """Let up to `steps` equal steps pass, until somebody arrives; return how many have."""
        cost, gaps, members = self.cost, self.result.gaps, plan.sequences
        step, live, flat = cost.step(plan), len(members), cost.flat
        longest = max(seq.computed for seq in members) + 1
        overhead = self.host.seconds(live)
        arrival, now, busy = self._arrivals[self._next], self.now, self.result.busy
        seconds = cost.seconds(step) + overhead
        for done in range(steps):
            before, now = now, now + seconds
            busy += seconds
            if not done:
                gaps.extend([now - (seq.last_token_at or 0.0) for seq in members])
            elif live == 1:
                gaps.append(now - before)
            else:
                gaps.extend([now - before] * live)
            if self._listens:
                self._tell(plan, now)
            if arrival <= now:
                # Who comes now begins to wait in this step: let the clock of the queue know which that is.
                self.scheduler._wait_clock.tick(before, self.scheduler.number + done - 1)
                break
            if not flat:
                longest += 1
                step = Step(
                    step.decodes, step.context + live, 0, 0, 0.0, 0,
                    longest if longest > step.longest else step.longest, 1, step.work + live,
                )  # fmt: skip
                seconds = cost.seconds(step) + overhead
        self.now, self.result.busy = now, busy
        return done + 1

    def _tell(self, plan: Plan, now: float) -> None:
        """Give a policy that listens the tokens of one equal step."""
        policy = self.scheduler.policy
        for seq in plan.sequences:
            seq.computed += 1
            seq.output_ids.append(0)
            seq.last_token_at = now
            policy.on_token(seq, now)

    def _book(self, plan: Plan, steps: int) -> None:
        """Write into the books what `steps` equal steps have changed, as that many commits would."""
        self.scheduler.number += steps - 1
        self.result.steps += steps
        batch = len(plan.sequences) + len(plan.held)
        for seq in plan.sequences:
            if not self._listens:
                seq.computed += steps
                seq.output_ids.extend([0] * steps)
                seq.last_token_at = self.now
            seq.batch_sum += batch * steps
            seq.last_iteration = self.scheduler.number

"""The server's scheduler on a virtual clock: arrivals in, records out, the same from every run.

One engine needs no event heap: the next event is the end of this step or, when the engine is idle, the next arrival or the
time at which the policy wants to be asked again. It must not know what a policy decides, or how a cost was fitted.

Decode steps in which nothing can change but the clock are gone through without a plan for each; the result is equal
bit for bit to that of asking every time (`fast_forward=False`, which records of single steps imply).
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from costs.cost import Cost, Host
from scheduling.driver import Driver, tokens_due
from scheduling.fast_forward import commit_equal_steps, identical_steps_ahead
from scheduling.iteration import Iteration, Plan, reasons
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from simulate.closed_loop import ClosedLoop
from simulate.stretch import gaps_between, gaps_of_step, step_ends, step_seconds

if TYPE_CHECKING:
    import numpy as np

FRUITLESS = 100_000  # turns without a token after which a policy is said to hang


class PolicyHangs(RuntimeError):
    """A policy lets a request wait forever."""


def waits_forever(scheduler: Scheduler) -> PolicyHangs:
    """Return the error for a policy that admits no request although nothing else will happen."""
    return PolicyHangs(
        f"{scheduler.policy.name} admits no request, with {len(scheduler.waiting)} in its queue, none running and "
        "none left to arrive. Return a time from deadline(), or admit one"
    )


def one_more(turns: int, scheduler: Scheduler, now: float) -> int:
    """Return the number of turns without a token, this one included; raise PolicyHangs if they are too many in a row."""
    if turns < FRUITLESS:
        return turns + 1
    name = scheduler.policy.name
    if scheduler.running:
        words = "released no finished request. Return those with a finish_reason from release()"
    else:
        words = "admitted no request. Return a later time from deadline(), or admit one"
    raise PolicyHangs(f"{name} was called {FRUITLESS:,} times in a row by {now:g} s and {words}")


@dataclass
class Run:
    """The result of a simulation: the sequences with their times, and the sums of the steps. Times are seconds.

    `gaps` are all times between two tokens of one sequence, in no order. `batches` counts the steps at which sequences joined,
    `drafts` how often a sequence had draft tokens in a step.
    """

    policy: str
    sequences: list[Sequence]
    host: Host = field(default_factory=Host)
    iterations: list[Iteration] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    steps: int = 0
    batches: int = 0
    drafts: int = 0
    busy: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    loop: ClosedLoop | None = None  # of the programs that were served

    @property
    def done(self) -> list[Sequence]:
        """The sequences that have their answer, in order of arrival."""
        return [seq for seq in self.sequences if seq.finish_reason in ("length", "stop")]

    @property
    def requests(self) -> int:
        return len(self.sequences)

    @property
    def answered(self) -> int:
        return len(self.done)

    @property
    def arrival(self) -> np.ndarray:
        return _array(seq.arrived_at - self.host.alpha0 for seq in self.done)

    @property
    def latency(self) -> np.ndarray:
        """Seconds from arrival to the end of the answer."""
        return self._since_arrival("finished_at", self.host.alpha1)

    @property
    def ttft(self) -> np.ndarray:
        """Seconds from arrival to the first token."""
        return self._since_arrival("first_token_at")

    @property
    def waiting(self) -> np.ndarray:
        """Seconds from arrival to admission."""
        return self._since_arrival("scheduled_at")

    def _since_arrival(self, name: str, more: float = 0.0) -> np.ndarray:
        before = self.host.alpha0
        return _array(getattr(seq, name) + more - (seq.arrived_at - before) for seq in self.done)

    @property
    def tokens(self) -> np.ndarray:
        return _array((len(seq.output_ids) for seq in self.done), int)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last answer."""
        return self.ended + self.host.alpha1 - self.began


def _array(values: Iterable[float], kind: type = float) -> np.ndarray:
    import numpy as np  # only summaries need it: a run in a browser has none

    return np.array([*values], kind)


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

    Those of a `ClosedLoop` bring others. `arrived_at` is when a sequence was sent, and while the run lasts `host.alpha0` later.
    Raise PolicyHangs when the policy never admits a waiting request.
    """
    simulation = Simulation(scheduler, arrivals, cost, host or Host(), records, fast_forward)
    simulation.run()
    return simulation.result


class Simulation(Driver):
    """The state of one run."""

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Iterable[Sequence],
        cost: Cost,
        host: Host,
        records: bool = False,
        fast_forward: bool = True,
    ) -> None:
        super().__init__(scheduler, arrivals)
        self.cost = cost
        self.host = host
        self.records = records
        self.result = Run(scheduler.policy.name, list(self.arrivals), host)
        if isinstance(arrivals, ClosedLoop):
            self.result.loop = arrivals
        if self.arrivals:
            self.result.began = self.arrivals[0].arrived_at
        # The scheduler sees a request alpha0 after it was sent; the figures of Run count from when it was sent.
        for seq in self.arrivals:
            seq.arrived_at += host.alpha0
        scheduler.record = records
        self._fruitless = 0
        self._fast_forward = fast_forward

    def run(self) -> None:
        """Run until all sequences have left."""
        super().run()
        self.result.ended = self.now
        if self.result.loop is not None:
            self.result.sequences.sort(key=lambda seq: seq.arrived_at)

    def sleep(self) -> None:
        """Advance `now` to the next arrival or to the policy's deadline."""
        until = self.next_event()
        if until == math.inf:
            raise waits_forever(self.scheduler)
        self._fruitless = one_more(self._fruitless, self.scheduler, self.now)
        if until <= self.now:  # rounding: oldest + delay <= now, while now - oldest < delay
            until = math.nextafter(self.now, math.inf)
        if self.host.poll and not self.scheduler.waiting:
            until = self.now + self.host.poll * math.ceil((until - self.now) / self.host.poll)
        self.now = until if self.scheduler.waiting else until + self.host.wake

    def serve(self, plan: Plan) -> None:
        """Let a step pass, and those that are sure to equal it."""
        self._fruitless = 0 if plan.sequences else one_more(self._fruitless, self.scheduler, self.now)
        self.result.batches += bool(plan.joined)
        seconds = step_seconds(self.cost, self.host, plan)
        alone = self.records or not self._fast_forward  # records need each step on its own
        most = 1 if alone else identical_steps_ahead(self.scheduler, plan)
        if most > 1:
            left = reasons(self._pass_equal_steps(plan, seconds, most))
        else:
            outputs = self.compute_one(plan, seconds)
            if self.records:
                iteration = self.scheduler.commit(plan, outputs, self.now)
                self.record(iteration)
                left = iteration.left
            else:
                left = reasons(self.scheduler.take_in(plan, outputs, self.now)[1])
        self.left(plan, left)

    def compute_one(self, plan: Plan, seconds: float) -> list[Output]:
        """Compute one step alone, which takes this many seconds and what arrivals add; return its tokens."""
        result = self.result
        if plan.drafts:
            result.drafts += sum(map(bool, plan.drafts))
        if not result.steps:
            seconds += self.host.first_step
        outputs = tokens_due(plan)
        seconds = self._with_arrivals(seconds)
        self.now += seconds
        result.gaps.extend(gaps_of_step(plan, outputs, self.now))
        result.steps += 1
        result.busy += seconds
        self.passed([self.now])
        return outputs

    def _with_arrivals(self, seconds: float) -> float:
        """Return how long a step takes in which the host receives the sequences that arrive before its end."""
        for seq in self.arrivals if self.host.receive else ():
            if seq.arrived_at > self.now + seconds:
                break
            seconds += self.host.receive
        return seconds

    def passed(self, ends: list[float]) -> None:
        """Take note of when one step ended, or several equal ones."""

    def record(self, iteration: Iteration) -> None:
        self.result.iterations.append(iteration)

    def left(self, plan: Plan, left: list[tuple[str, str]]) -> None:
        """Take note of a step that was computed, and which sequences left with it, for which reason."""
        if self.result.loop is not None and left:
            # Before the next step ends no other call is sent, so fast-forward knows all arrivals that it may pass.
            for seq in self.result.loop.follow(left, self.now + self.host.alpha1):
                seq.arrived_at += self.host.alpha0
                self.result.sequences.append(seq)
                insort(self.arrivals, seq, key=lambda other: other.arrived_at)

    def _pass_equal_steps(self, plan: Plan, seconds: float, most: int) -> list[Sequence]:
        """Let up to `most` steps pass that equal this plan, which takes `seconds`; return the sequences that leave.

        A sequence that arrives during a step can only join after it, so that step is the last.
        """
        arrival = self.arrivals[0].arrived_at if self.arrivals else math.inf
        ends, spent, last = step_ends(self.cost, self.host, plan, seconds, self.now, most - 1, arrival)
        if ends:
            self.now = ends[-1]
        last = self._with_arrivals(last)
        self.now += last
        ends.append(self.now)
        spent.append(last)
        result = self.result
        result.gaps.extend(gaps_between(plan, ends))
        result.busy = reduce(add, spent, result.busy)  # as without this shortcut: sum() may round otherwise
        result.steps += len(ends)
        answered = commit_equal_steps(self.scheduler, plan, ends)
        self.passed(ends)
        return answered

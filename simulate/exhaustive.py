"""A policy under all arrivals of a few short requests: whether it keeps the laws there is decided, not sampled.

Each request arrives before one of the steps, alone or with others, or while the policy sleeps; that is every way in which
a loop can see it, since it looks at arrivals only between steps. An idle machine gets the next request at once. Prompts
and answers have all lengths up to the longest; clients and priorities alternate, and every second request has a deadline.

A run makes its choices from a script, and then none arrive until one must; each choice that it could have made otherwise is a
script to go through later. The steps that a script repeats kept the laws when they were new. Where a state equals one of an earlier run, its future is known, and the run ends (symmetry: times
count from now, and requests that have left are forgotten). So a policy may decide by differences between times, and not by the
time itself or by the number of the step. The law of fair clients is left out, because so few requests cannot break it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from math import isfinite
from typing import Any

from scheduling.iteration import Iteration, Plan
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.case import Case, Request
from simulate.laws import Broken
from simulate.trial import Trial, laws_named

START = 1_000_000  # when a run begins, so that what is remembered as a number of this size is a time
PAUSE = 10  # until the next request comes to a policy that would wait for it forever
Shape = tuple[int, int]  # tokens of prompt and answer
Script = tuple[Shape | None, ...]


@dataclass(frozen=True)
class Scope:
    """All lists of up to `requests` requests with prompts and answers of up to `longest` tokens, in `slots` slots."""

    requests: int = 4
    longest: int = 3
    slots: int = 2

    def __str__(self) -> str:
        return (
            f"all arrivals of up to {self.requests} requests with prompts and answers of up to {self.longest} tokens "
            f"in {self.slots} slots"
        )


DEFAULT_SCOPE = Scope()


class Known(Exception):
    """The state of a run equals one whose future is known."""


class ScriptedTrial(Trial):
    """A run whose requests come as a script has it; `ahead` gets the scripts of the other choices, `seen` the states."""

    def __init__(
        self, scheduler: Scheduler, scope: Scope, left: int, script: Script, seen: set[Hashable], ahead: list[Script]
    ) -> None:
        super().__init__(Case((), scope.slots), scheduler, [])
        self._service = None
        lengths = range(1, scope.longest + 1)
        self._shapes: list[Shape] = [(prompt, answer) for prompt in lengths for answer in lengths]
        self._script, self._place = script, 0
        self._left, self._seen, self._ahead = left, seen, ahead
        self.now = START

    def run(self) -> None:
        """Serve the requests; raise Broken when a law is broken."""
        with contextlib.suppress(Known):
            super().run()

    def deliver(self) -> None:
        while self._left and (shape := self._choice(not self.arrivals and self.scheduler.is_idle)):
            self._expect(shape, self.now)
        super().deliver()

    def drain(self) -> None:
        if not self._left:
            super().drain()

    def sleep(self) -> None:
        wake = self.scheduler.wake_at(self.now)
        until = self.now + PAUSE if wake is None else (self.now + wake) // 2
        if self._left and self.now < until and (shape := self._choice(wake is None)):
            self._expect(shape, until)
        super().sleep()

    def check_plan(self, plan: Plan) -> None:
        if self._place == len(self._script):
            super().check_plan(plan)

    def check_record(self, iteration: Iteration, answered: list[Sequence]) -> None:
        if self._place == len(self._script):
            super().check_record(iteration, answered)

    def _expect(self, shape: Shape, at: float) -> None:
        """Let a request arrive."""
        number, (prompt, output) = len(self.sequences), shape
        seq = Sequence(
            [0] * prompt, output, id=f"r{number}", arrived_at=int(at), client="ab"[number % 2], priority=number % 2,
            deadline=at + 40 if number % 2 else None,
        )  # fmt: skip
        self.sequences.append(seq)
        self._first_tokens[seq] = number
        self.arrivals.append(seq)
        self._left -= 1

    def _choice(self, must: bool) -> Shape | None:
        """Return the next request if one arrives now, as it `must` or as the script has it."""
        if self._place == len(self._script):
            state = self._state()
            if state in self._seen:
                raise Known
            self._seen.add(state)
            options: list[Shape | None] = [*([] if must else [None]), *self._shapes]
            self._ahead += [(*self._script, option) for option in options[1:]]
            self._script = (*self._script, options[0])
        self._place += 1
        return self._script[self._place - 1]

    def _state(self) -> Hashable:
        """Return what the future depends on."""
        scheduler = self.scheduler
        self._ranks = {seq: rank for rank, seq in enumerate(s for s in self.sequences if s.state != "finished")}
        policy = {name: value for name, value in vars(self.policy).items() if not callable(value)}
        inside = [scheduler.waiting, scheduler.running, self.arrivals, self._preemptions.stuck]
        return (
            self._left,
            len(self.sequences) % 2,
            scheduler.number == 0,
            *(self._frozen(each) for each in (*inside, policy)),
        )

    def _frozen(self, value: Any) -> Hashable:
        """Return a value with the same content, in which times count from now; an unknown object equals only itself."""
        if isinstance(value, bool | str | bytes | type(None)):
            return value
        if isinstance(value, int | float):
            if not isfinite(value) or value > START**2:  # a limit that is not set
                return value
            times = round(value / START)
            return (times, value - times * self.now) if times else value
        if isinstance(value, Sequence):
            stamps = (value.arrived_at, value.scheduled_at, value.first_token_at, value.last_token_at, value.deadline)
            return (
                value.state, len(value.prompt_ids), value.max_tokens, len(value.output_ids), value.computed, value.slot,
                value.preemptions, value.recompute_until, value.finish_reason, value.client, value.priority,
                self._ranks.get(value, value.id), *(at if at is None else at - self.now for at in stamps),
            )  # fmt: skip
        if isinstance(value, dict):
            return (dict, *((self._frozen(k), self._frozen(v)) for k, v in value.items()))
        if isinstance(value, list | tuple | deque):
            return (list, *map(self._frozen, value))
        if isinstance(value, set | frozenset):
            return frozenset(map(self._frozen, value))
        if isinstance(value, count):
            return repr(value)
        return (type(value), self._frozen(vars(value))) if hasattr(value, "__dict__") else value

    def as_case(self, slots: int) -> Case:
        """Return the requests so far as a case to try again."""
        return Case(
            tuple(
                Request(
                    int(s.arrived_at) - START, tuple(s.prompt_ids), s.max_tokens, s.client, s.priority,
                    s.deadline and s.deadline - START,
                )
                for s in self.sequences
            ),
            slots,
        )  # fmt: skip


@dataclass(frozen=True)
class Explored:
    """What came of going through a scope: the runs, and how a law is broken with the case that shows it, or neither."""

    runs: int
    states: int
    broken: Broken | None = None
    case: Case | None = None


def explore(make: Callable[[int], Policy], scope: Scope) -> Explored:
    """Go through a scope, fewest requests first, until a law is broken."""
    seen: set[Hashable] = set()
    runs = 0
    for requests in range(1, scope.requests + 1):
        ahead: list[Script] = [()]
        while ahead:
            with laws_named():
                policy = make(scope.slots)
            trial = ScriptedTrial(Scheduler(policy, record=False), scope, requests, ahead.pop(), seen, ahead)
            runs += 1
            try:
                with laws_named(policy):
                    trial.run()
            except Broken as broken:
                return Explored(runs, len(seen), broken, trial.as_case(scope.slots))
    return Explored(runs, len(seen))

"""A policy under all arrivals of a few short requests: whether it keeps the laws there is decided, not sampled.

Each request arrives before one of the steps, alone or with others, or while the policy sleeps; that is every way in which
a loop can see it, since it looks at arrivals only between steps. An idle machine gets the next request at once. Prompts
and answers have all lengths up to the longest; clients and priorities alternate, and every second request has a deadline.

A run makes its choices from a script, and then the first of each; every other option is a script to go through later. The
steps that a script repeats kept the laws when they were new. Three things make the runs few, and none makes them decide less:

* A length is chosen when something first asks for it. Until then a run is that of all lengths.
* Where a state equals one of an earlier run, its future is known, and the run ends. Times count from now, and requests that
  have left are forgotten. So a policy may decide by differences between times, and not by the time itself or by the number
  of the step. No run comes back to a state of its own: its requests grow older.
* What a policy and its laws never ask of a request, such as its client or when it joined, is no part of the state. When one
  asks for it after all, the search begins again with it.

The law of fair clients is left out, because so few requests cannot break it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from math import inf, isfinite
from typing import Any

from scheduling.claims import Claims
from scheduling.hooks import overrides
from scheduling.iteration import Iteration, Plan
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.laws.case import Case, Request
from simulate.laws.laws import Broken
from simulate.laws.trial import Trial, laws_named

START = 1_000_000  # when a run begins: a number of this size that a policy remembers is a time
PAUSE = 10  # until the next request comes to a policy that would wait for it forever
Script = tuple[tuple[str, int], ...]  # pairs of a question and the answer chosen
LENGTHS = ("prompt_ids", "max_tokens")
TIMES = ("arrived_at", "scheduled_at", "first_token_at", "last_token_at", "deadline")
ASKED = (*TIMES, "client", "priority", "id")
# What asks for an attribute without a decision by it, except for whether a time is None: the key of a state has that.
BOOKKEEPING = {
    ("scheduling.driver", "deliver"), ("scheduling.driver", "next_event"),  # an arrival, which is now
    ("scheduling.scheduler", "add"), ("scheduling.scheduler", "arrive"), ("scheduling.backlog", "estimate"),
    ("scheduling.wait_queue", "arrive"), ("scheduling.wait_queue", "next_expiry"), ("scheduling.wait_queue", "_note_join"),
    ("scheduling.advance", "_advance_one"), ("scheduling.scheduler", "commit"), ("scheduling.scheduler", "<listcomp>"),
}  # fmt: skip
CONSTANT = (int, float, str, type(None), Claims)


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


class Undecided(Sequence):
    """A request whose lengths are chosen when something first asks for them; `asked` gets what a policy asks of it."""

    __slots__ = ("asked", "choose", "chosen")

    def __init__(self, choose: Callable[[str], int], asked: set[str], **fields: Any) -> None:
        self.choose, self.asked, self.chosen = choose, asked, dict[str, int]()
        super().__init__([], 0, **fields)
        del self.prompt_ids, self.max_tokens  # an empty slot is looked up by __getattr__

    def __getattr__(self, name: str) -> Any:
        if name not in LENGTHS:
            raise AttributeError(name)
        self.chosen[name] = length = self.choose(f"{name} of {self.id}")
        value = [0] * length if name == "prompt_ids" else length
        setattr(self, name, value)
        return value


def _noted(name: str) -> property:
    """Return an attribute of a request that notes when a policy asks for it."""
    slot = getattr(Sequence, name)

    def read(self: Undecided) -> Any:
        if name not in self.asked:
            caller = sys._getframe(1)
            module = caller.f_globals["__name__"]
            if (module, caller.f_code.co_name) not in BOOKKEEPING and not module.startswith("simulate."):
                self.asked.add(name)
        return slot.__get__(self)

    return property(read, slot.__set__)


for _name in ASKED:
    setattr(Undecided, _name, _noted(_name))


class ScriptedTrial(Trial):
    """A run that makes its choices from a script; it adds the other choices to `ahead` and its states to `seen`."""

    def __init__(
        self, scheduler: Scheduler, scope: Scope, left: int, script: Script, seen: set[Hashable], ahead: list[Script],
        asked: set[str],
    ) -> None:  # fmt: skip
        super().__init__(Case((), scope.slots), scheduler, [])
        self._service = None
        self._lengths = range(1, scope.longest + 1)
        self._script, self._place = script, 0
        self._left, self._seen, self._ahead = left, seen, ahead
        self.now = START
        self._asked = asked
        claims = self.policy.claims
        overtaking = claims.overtaking_tokens < inf and overrides(
            self.policy, "order"
        )  # without an order, none overtakes
        if claims.guard < inf or claims.overtakes < inf or 0 < claims.patience < inf or overtaking:
            asked.add("arrived_at")
        self._first = dict(vars(self.policy))

    def run(self) -> None:
        """Serve the requests; raise Broken when a law is broken."""
        try:
            super().run()
        except Known:
            self.check_outcomes([seq for seq in self.sequences if seq.state == "finished"])

    def deliver(self) -> None:
        if self._is_new:
            state = self._state()
            if state in self._seen:
                raise Known
            self._seen.add(state)
        if self._left:
            must = not self.arrivals and self.scheduler.is_idle
            for _ in range(self._choose("arrivals", range(must, self._left + 1))):
                self._expect(self.now)
        super().deliver()

    def drain(self) -> None:
        if not self._left:
            super().drain()

    def sleep(self) -> None:
        wake = self.scheduler.wake_at(self.now)
        until = self.now + PAUSE if wake is None else (self.now + wake) // 2
        if self._left and self.now < until and self._choose("an arrival in sleep", range(wake is None, 2)):
            self._expect(until)
        super().sleep()

    def check_plan(self, plan: Plan) -> None:
        if self._is_new:
            super().check_plan(plan)

    def check_record(self, iteration: Iteration, answered: list[Sequence]) -> None:
        if self._is_new:
            super().check_record(iteration, answered)

    def _expect(self, at: float) -> None:
        """Let a request arrive."""
        number = len(self.sequences)
        seq = Undecided(
            lambda what: self._choose(what, self._lengths), self._asked,
            id=f"r{number}", arrived_at=int(at), client="ab"[number % 2], priority=number % 2,
            deadline=at + 40 if number % 2 else None,
        )  # fmt: skip
        self.sequences.append(seq)
        self._first_tokens[seq] = number
        self.arrivals.append(seq)
        self._left -= 1

    @property
    def _is_new(self) -> bool:
        """Whether the script is at its end."""
        return self._place == len(self._script)

    def _choose(self, what: str, options: range) -> int:
        """Return one of the options, as the script has it."""
        if self._is_new:
            self._ahead += [(*self._script, (what, option)) for option in options[1:]]
            self._script = (*self._script, (what, options[0]))
        before, option = self._script[self._place]
        if before != what:
            raise Broken("repeatable", f"when the case is run again, {what} is asked for, and not {before}")
        self._place += 1
        return option

    def _state(self) -> Hashable:
        """Return what the future depends on."""
        scheduler, inside = self.scheduler, [seq for seq in self.sequences if seq.state != "finished"]
        self._ranks = {seq: rank for rank, seq in enumerate(inside)}
        self._met: dict[int, tuple[int, Any]] = {}  # objects in the order in which they were met
        policy = {
            name: value for name, value in vars(self.policy).items()
            if not callable(value) and not (isinstance(value, CONSTANT) and value is self._first.get(name))
        }  # fmt: skip
        expiries = [(at, seq) for at, _, seq in scheduler.queue.expiries]
        passed = self._overtaking.passed if self._overtaking is not None else {}
        overtaken = [(seq, passed[seq]) for seq in scheduler.waiting if seq in passed]
        places = (
            scheduler.waiting,
            scheduler.running,
            self.arrivals,
            self._preemptions.stuck,
            expiries,
            overtaken,
            policy,
        )
        return (
            self._left,
            bool({"client", "priority", "deadline"} & self._asked) and len(self.sequences) % 2,
            "id" in self._asked and len(self.sequences),
            scheduler.number == 0,
            *map(self._content, inside),
            *map(self._frozen, places),
        )

    def _content(self, seq: Sequence) -> Hashable:
        """Return what the future of a request depends on."""
        assert isinstance(seq, Undecided)
        return (
            seq.state, *map(seq.chosen.get, LENGTHS), len(seq.output_ids), seq.computed, seq.slot, seq.preemptions,
            seq.recompute_until, seq.finish_reason, seq.scheduled_at is None, seq.first_token_at is None,
            *(self._frozen(getattr(seq, name)) for name in ASKED if name in self._asked),
        )  # fmt: skip

    def _frozen(self, value: Any) -> Any:
        """Return what stands for a value in the key of a state.

        Invariant: two values that differ in a way that a policy can see have different keys, or a state with another future
        would end a run and hide a broken law. The reverse need not hold: a key that is too fine only costs runs. Only three
        differences are dropped, which no policy that keeps the laws goes by: when now is, which requests have left, and
        where objects lie in memory.
        """
        if isinstance(value, bool | str | bytes | type(None)):
            return value
        if isinstance(value, int | float):
            return self._frozen_number(value)
        if isinstance(value, Sequence):
            # A request that is inside has a place in the key; of one that has left, the content still matters.
            rank = self._ranks.get(value)
            return (value.id, self._content(value)) if rank is None else (Sequence, rank)
        if isinstance(value, dict):
            return (dict, *((self._frozen(k), self._frozen(v)) for k, v in value.items()))
        if isinstance(value, list | tuple | deque):
            return (list, *map(self._frozen, value))
        if isinstance(value, set | frozenset):
            return frozenset(map(self._frozen, value))
        if isinstance(value, count):
            return repr(value)
        return self._frozen_object(value)

    def _frozen_number(self, value: float) -> Any:
        """Return a number, as its distance from now if it is a time or a sum of times.

        A run begins at START, and no number that is not a time comes near it: neither tokens nor differences of times.
        """
        if not isfinite(value) or value > START**2:  # a limit that is not set
            return value
        times = round(value / START)
        return (times, value - times * self.now) if times else value

    def _frozen_object(self, value: Any) -> Any:
        """Return the type and content of an object, or for one that was met before, which one it is."""
        if id(value) in self._met:
            return (type(value), self._met[id(value)][0])
        self._met[id(value)] = (len(self._met), value)  # which keeps it alive, so that its id stays its own
        try:
            made = value.__reduce_ex__(2)
        except TypeError:
            return value  # without a content to compare, it equals only itself
        return value if callable(value) or isinstance(made, str) else (type(value), *map(self._frozen, made[1:3]))

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


def explore(
    make: Callable[[int], Policy], scope: Scope, progress: Callable[[int], None] = lambda runs: None
) -> Explored:
    """Go through a scope, fewest requests first, until a law is broken; `progress` is called with the number of runs."""
    asked: set[str] = set()
    runs = 0
    while True:
        known, seen = len(asked), set[Hashable]()
        for requests in range(1, scope.requests + 1):
            ahead: list[Script] = [()]
            while ahead and len(asked) == known:
                with laws_named():
                    policy = make(scope.slots)
                trial = ScriptedTrial(Scheduler(policy, record=False), scope, requests, ahead.pop(), seen, ahead, asked)
                runs += 1
                progress(runs)
                try:
                    with laws_named(policy):
                        trial.run()
                except Broken as broken:
                    return Explored(runs, len(seen), broken, trial.as_case(scope.slots))
        if len(asked) == known:
            return Explored(runs, len(seen))

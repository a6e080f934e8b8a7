"""The laws that every policy keeps, held against one case step by step.

A case is some requests with whole-number times; `try_case` serves it on the real `Scheduler` and raises `Broken`
with the law and what happened, in plain words, at the first step that breaks one. It must not know how cases are found.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from scheduling.iteration import Iteration, Plan
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Output, PolicyError, Scheduler
from scheduling.sequence import Sequence

WORK = "no idle slot while a request fits"
ENDLESS = 1 << 60  # the tokens of a step where there is no limit
NAMED = 8  # requests that a message names at most


class Broken(Exception):
    """A law is broken: `law` names it, `words` say what happened."""

    def __init__(self, law: str, words: str) -> None:
        super().__init__(f"{law}: {words}")
        self.law = law
        self.words = words


@dataclass(frozen=True)
class Request:
    """What somebody asks for; times are whole numbers of no unit."""

    arrival: int
    prompt: tuple[int, ...]
    output: int
    client: str = "a"
    priority: int = 0
    deadline: float | None = None


@dataclass(frozen=True)
class Case:
    """Requests in order of arrival, and what there is to serve them with.

    `pages` is (pages, tokens of a page) or None for KV without end; `cancels` says before which step who goes, as an
    index into those inside.
    """

    requests: tuple[Request, ...]
    slots: int = 2
    budget: int = ENDLESS
    pages: tuple[int, int] | None = None
    prefix_cache: bool = False
    drains: bool = True
    cancels: tuple[tuple[int, int], ...] = ()

    def sequences(self, backwards: bool = False) -> list[Sequence]:
        """Return fresh sequences r0, r1, ...; made `backwards`, they lie the other way round in memory."""
        numbered = list(enumerate(self.requests))
        made = [
            Sequence(
                list(r.prompt), r.output, id=f"r{i}", arrived_at=r.arrival, client=r.client,
                priority=r.priority, deadline=r.deadline,
            )
            for i, r in (reversed(numbered) if backwards else numbered)
        ]  # fmt: skip
        return made[::-1] if backwards else made

    def pool(self) -> PagePool | None:
        if self.pages is None:
            return None
        return PagePool(*self.pages, prefix_cache=self.prefix_cache, salt="check")


def toy_cost(plan: Plan) -> int:
    """Return 10 + prompt tokens + 2 x decoding rows, padded and held ones too."""
    prompt = sum(n for s, n in zip(plan.sequences, plan.counts) if s.is_prefilling) + plan.padding
    decodes = sum(1 for s in plan.sequences if not s.is_prefilling) + len(plan.held)
    return 10 + prompt + 2 * decodes


def first_token(seq: Sequence) -> int:
    """Return the number from which the tokens of a sequence count up, whoever else is in the batch."""
    return sum(seq.prompt_ids) * 31 + len(seq.prompt_ids) * 7


def step_limit(case: Case, budget: int) -> int:
    """Return a number of steps that no policy needs: much more than the requests take one by one."""
    alone = sum(-(-len(r.prompt) // budget) + r.output for r in case.requests)
    return 2000 + 2 * alone


@dataclass
class Trial:
    """One case on its way through a scheduler, with books of its own."""

    case: Case
    scheduler: Scheduler
    sequences: list[Sequence]
    now: float = 0
    added: int = 0  # requests that have come
    left: int = 0  # of these, requests that have their outcome
    records: list[Iteration] = field(default_factory=list)
    events: list[tuple[float, int]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    service: dict[str, float] = field(default_factory=dict)
    backlog: list[tuple[set[str], dict[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy: Policy = self.scheduler.policy
        self.first_tokens = {seq: first_token(seq) for seq in self.sequences}
        deciding = next(c for c in type(self.policy).__mro__ if "order" in vars(c))
        self.guard = getattr(self.policy, "guard", inf) if hasattr(deciding, "guard") else inf

    def run(self) -> None:
        """Serve everybody; Broken at the first thing that must not be."""
        todo = sorted(self.sequences, key=lambda seq: seq.arrived_at)
        cancels = dict(self.case.cancels)
        limit = step_limit(self.case, self.scheduler.token_budget)
        self._watch_admit()
        while todo or not self.scheduler.is_idle:
            self._take_in(todo)
            self._cancel(cancels)
            oldest = next(iter(self.scheduler.waiting), None)
            plan = self.scheduler.plan(self.now)
            if plan is None:
                self._sleep(todo)
                continue
            self._check_guard(plan, oldest)
            self._check_plan(plan)
            self._check_conservation_of_work(plan)
            self._compute(plan)
            if self.scheduler.number > limit:
                inside = [*self.scheduler.waiting, *self.scheduler.running]
                raise Broken("no request starves", f"unfinished after {limit} steps: {names(inside)}")
        self._check_end()

    def _watch_admit(self) -> None:
        asked = self.policy.admit

        def admit(waiting: Any, running: Any, budget: Any, now: float) -> int:
            n = asked(waiting, running, budget, now)
            if n > budget.slots:
                raise Broken(
                    "slots", f"admit() returned {n}, but only {budget.slots} of {self.case.slots} slots are free"
                )
            return n

        self.policy.admit = admit  # type: ignore[method-assign]

    def _take_in(self, todo: list[Sequence]) -> None:
        while todo and todo[0].arrived_at <= self.now:
            seq = todo.pop(0)
            self.added += 1
            if self.scheduler.add(seq):
                self.events.append((seq.arrived_at, +1))
                continue
            self.outcomes[seq.id] += 1
            self.left += 1
            if not self.policy.refuses:
                raise Broken(
                    "no request is refused",
                    f"{seq.id} with a prompt of {len(seq.prompt_ids)} tokens is refused. A policy that refuses requests "
                    "must declare it: refuses = True",
                )
        if not todo and (self.case.drains or self.policy.patience == inf):
            self.scheduler.drain()

    def _cancel(self, cancels: dict[int, int]) -> None:
        index = cancels.pop(self.scheduler.number, None)
        if index is None:
            return
        inside = [*self.scheduler.waiting, *self._unfinished()]
        if not inside:
            return
        seq = inside[index % len(inside)]
        self._book(self.scheduler.remove(seq, self.now))
        if seq in self.scheduler.waiting or seq in self.scheduler.running:
            raise Broken("cancelled requests leave", f"{seq.id} was cancelled but is still in the system")

    def _book(self, left: list[Sequence]) -> None:
        for seq in left:
            self.outcomes[seq.id] += 1
            self.left += 1
            self.events.append((self.now, -1))

    def _sleep(self, todo: list[Sequence]) -> None:
        """Let time pass to the next arrival or the policy's deadline, if nobody waits in vain."""
        waiting = self.scheduler.waiting
        if not waiting:
            if todo:
                self.now = max(self.now, todo[0].arrived_at)
            return
        oldest = min(waiting, key=lambda seq: seq.arrived_at)
        latest = oldest.arrived_at + self.policy.patience
        if self.now >= latest:
            law = "deadlines" if self.policy.patience else WORK
            raise Broken(law, f"at {self.now:g} no request runs or is admitted; waiting: {names(waiting)}")
        wake_at = self.scheduler.wake_at(self.now)
        if wake_at is not None and wake_at <= self.now:
            raise Broken("deadlines", f"deadline() returned {wake_at:g}, but at {self.now:g} no request is admitted")
        times = [seq.arrived_at for seq in todo[:1]] + ([wake_at] if wake_at is not None else [])
        if not times:
            raise Broken(
                "no request starves",
                f"no request runs or will arrive, and deadline() returns no time; waiting forever: {names(waiting)}",
            )
        self.now = min(times)
        if self.now > latest:
            raise Broken(
                "deadlines", f"{oldest.id} may wait until {latest:g}, but the policy sleeps until {self.now:g}"
            )

    def _check_guard(self, plan: Plan, oldest: Sequence | None) -> None:
        """An order with a guard puts the oldest first when it has waited for longer."""
        if oldest is None or not plan.joined or self.guard == inf:
            return
        waited = self.now - oldest.arrived_at
        if waited > self.guard and plan.joined[0] is not oldest:
            raise Broken(
                "starvation guard",
                f"{oldest.id} has waited for {waited:g}, which is more than {self.guard:g}, and "
                f"{plan.joined[0].id} is served before it",
            )

    def _check_plan(self, plan: Plan) -> None:
        policy, running = self.policy, self.scheduler.running
        members = [*plan.sequences, *plan.held, *plan.paused]
        twice = len(set(members)) < len(members)
        if twice or len({s.slot for s in running}) < len(running):
            raise Broken("no request twice in a step", f"step {plan.number} has {names(members)}")
        if len(running) > policy.max_batch_size:
            raise Broken("slots", f"{len(running)} requests run in {policy.max_batch_size} slots")
        for seq, count in zip(plan.sequences, plan.counts):
            if seq.is_finished or seq.state != "running":
                raise Broken("no request runs after it finishes", f"{seq.id} is finished but computes {count} tokens")
            if seq.arrived_at > self.now:
                raise Broken("no request runs before it arrives", f"{seq.id} in step {plan.number}")
        if not policy.padded and sum(plan.counts) > self.scheduler.token_budget:
            raise Broken("tokens of a step", f"{sum(plan.counts)} computed, {self.scheduler.token_budget} allowed")
        if plan.held and not policy.holds:
            raise Broken("slots of finished requests", f"finished requests hold slots: {names(plan.held)}")
        if not plan.sequences and not policy.overruns:
            raise Broken(
                "slots of finished requests",
                f"a step is computed for no request; {names(plan.held)} have all their tokens",
            )

    def _check_conservation_of_work(self, plan: Plan) -> None:
        """No slot stays empty while the next in order fits, where the policy says so."""
        scheduler, policy = self.scheduler, self.policy
        free = policy.max_batch_size - len(scheduler.running)
        if not policy.conserving or not scheduler.waiting or free <= 0:
            return
        first = next(iter(policy.order(scheduler.waiting, self.now)), None)
        if first is None:
            raise Broken(WORK, f"order() returns no request; waiting: {names(scheduler.waiting)}")
        reason = scheduler._wait_clock.reason
        pages = scheduler.pages
        if reason == "kv_full" and getattr(policy, "kv_tokens", 0):
            return
        if reason == "kv_full" and pages is not None:
            if pages.reserve(first.hashes, first.total) is None:
                return
        elif reason == "token_budget":
            needed = first.pending - policy.cached_tokens(first)
            if sum(plan.counts) + needed > scheduler.token_budget or sum(plan.counts) >= scheduler.token_budget:
                return
        raise Broken(WORK, f"at {self.now:g} {free} slots are empty, but {first.id} waits (reason: {reason})")

    def _compute(self, plan: Plan) -> None:
        outputs: list[Output] = [
            self._token(seq, len(seq.output_ids)) if count == seq.pending else None
            for seq, count in zip(plan.sequences, plan.counts)
        ]
        if self.policy.fair:
            self._book_service(plan, outputs)
        before = self._unfinished()
        self.now += toy_cost(plan)
        iteration = self.scheduler.commit(plan, outputs, self.now)
        self.records.append(iteration)
        done = [seq for seq in before if seq.state == "finished"]
        self._book(done)
        self._check_books(iteration, done)

    def _token(self, seq: Sequence, place: int) -> int:
        return (self.first_tokens[seq] + place) % 997

    def _unfinished(self) -> list[Sequence]:
        """Return who runs and has no answer yet."""
        return [seq for seq in self.scheduler.running if seq.state != "finished"]

    def _book_service(self, plan: Plan, outputs: list[Output]) -> None:
        """Write down what each client is served by this step, and which clients still have requests waiting."""
        price = self._price
        for seq in plan.joined:
            if not seq.preemptions:
                self._serve(seq.client, price(len(seq.prompt_ids), 0))
        for seq, output in zip(plan.sequences, outputs):
            if output is not None:
                prompt, number = len(seq.prompt_ids), len(seq.output_ids) + 1
                self._serve(seq.client, price(prompt, number) - price(prompt, number - 1))
        self.backlog.append(({s.client for s in self.scheduler.waiting}, dict(self.service)))

    def _serve(self, client: str, price: float) -> None:
        self.service[client] = self.service.get(client, 0.0) + price / self._weight(client)

    @property
    def _price(self) -> Callable[[int, float], float]:
        """What a request of so many prompt and generated tokens costs, by the policy's own account."""
        return getattr(self.policy, "price", lambda prompt, output: prompt + 2.0 * output)

    @property
    def _weight(self) -> Callable[[str], float]:
        return getattr(self.policy, "weight", lambda client: 1.0)

    def _check_books(self, iteration: Iteration, done: list[Sequence]) -> None:
        """Hold the scheduler's books after a step against our own; `done` were answered by it."""
        scheduler, policy = self.scheduler, self.policy
        running = len(self._unfinished())
        if self.added != len(scheduler.waiting) + running + self.left:
            raise Broken(
                "no request is lost",
                f"{self.added} arrived, but {len(scheduler.waiting)} wait, {running} run and {self.left} finished",
            )
        now_done = sorted(seq.id for seq in done)
        if sorted(id for id, _ in iteration.left) != now_done:
            raise Broken("one outcome each", f"{now_done} left, but the record has {iteration.left}")
        late = [seq for seq in done if seq.last_token_at != self.now]
        if late and not policy.holds:
            raise Broken(
                "slots of finished requests",
                f"{late[0].id} got its last token at {late[0].last_token_at:g} but leaves at {self.now:g}",
            )
        spent = iteration.slot_steps
        if abs(sum(spent) - policy.max_batch_size) > 1e-9 or min(spent) < -1e-12:
            raise Broken("slot-steps add up", f"{spent} of {policy.max_batch_size} slots")
        if scheduler.pages is not None:
            used = {page for seq in scheduler.running for page in seq.pages}
            if scheduler.pages.used != len(used) or 0 in used:
                raise Broken("pages", f"{scheduler.pages.used} pages are allocated, but {len(used)} are in use")

    def _check_end(self) -> None:
        scheduler = self.scheduler
        for seq in self.sequences:
            if self.outcomes[seq.id] != 1:
                raise Broken("one outcome each", f"{seq.id} has {self.outcomes[seq.id]}")
            wanted = [self._token(seq, place) for place in range(seq.max_tokens)]
            if seq.finish_reason == "length" and seq.output_ids != wanted:
                raise Broken("exactly its tokens", f"{seq.id} has {seq.output_ids}, not {wanted}")
        if sorted(scheduler._free_slots) != list(range(self.policy.max_batch_size)):
            raise Broken("slots", f"free at the end: {sorted(scheduler._free_slots)}")
        if scheduler.pages is not None and scheduler.pages.free != scheduler.pages.total:
            raise Broken("pages", f"{scheduler.pages.used} pages are never freed")
        self._check_little()
        if self.policy.fair:
            self._check_fairness()

    def _check_little(self) -> None:
        area, inside, before = 0.0, 0, 0.0
        for at, change in sorted(self.events):
            area += inside * (at - before)
            inside, before = inside + change, at
        latencies = sum((s.finished_at or 0) - s.arrived_at for s in self.sequences)
        if inside or abs(area - latencies) > 1e-6:
            raise Broken("Little's law", f"area {area:g}, sum of latencies {latencies:g}")

    def _check_fairness(self) -> None:
        """Two clients that both have requests waiting are served alike, within the bound of VTC's theorem.

        The counters of two such clients differ by one prompt and what a full batch generates at most.
        """
        price, slots = self._price, self.case.slots
        asked = [(len(r.prompt), r.output, self._weight(r.client)) for r in self.case.requests]
        joining = max(price(p, 0) / w for p, _, w in asked)
        generating = max((price(p, n) - price(p, 0)) / w for p, n, w in asked)
        bound = 2 * (joining + slots * generating) + 1e-6
        for a, b in itertools.combinations(sorted(self.service), 2):
            marked = [({a, b} <= clients, served) for clients, served in self.backlog]
            for both, steps in itertools.groupby(marked, key=lambda step: step[0]):
                gaps = [served.get(a, 0.0) - served.get(b, 0.0) for _, served in steps]
                if both and max(gaps) - min(gaps) > bound:
                    raise Broken(
                        "fair between clients",
                        f"{a} and {b} both had requests waiting, and one got "
                        f"{max(gaps) - min(gaps):g} more service than the other; the limit is {bound:g}",
                    )


def names(sequences: Collection[Sequence]) -> str:
    """Return the names of some sequences, and how many more there are."""
    more = f" and {len(sequences) - NAMED:,} more" if len(sequences) > NAMED else ""
    return ", ".join(seq.id for seq in itertools.islice(sequences, NAMED)) + more


def try_case(
    make: Callable[[int], Policy], case: Case, make_scheduler: Callable[..., Scheduler] = Scheduler, twice: bool = True
) -> Trial:
    """Serve a case, `twice` with fresh policies and other addresses in memory; Broken when a law is."""
    trials = [
        _trial(make, case, case.sequences(backwards), make_scheduler)
        for backwards in ((False, True) if twice else (False,))
    ]
    if twice and trials[0].records != trials[1].records:
        step = next(i for i, (x, y) in enumerate(zip(*(t.records for t in trials))) if x != y)
        raise Broken("repeatable", f"step {step + 1} differs when the case is run again")
    return trials[0]


def _trial(
    make: Callable[[int], Policy], case: Case, sequences: list[Sequence], make_scheduler: Callable[..., Scheduler]
) -> Trial:
    try:
        trial = Trial(case, make_scheduler(make(case.slots), case.pool(), case.budget), sequences)
        trial.run()
    except Broken:
        raise
    except PolicyError as error:
        raise Broken(_law_of(str(error)), str(error)) from error
    except AssertionError as error:
        law = "pages" if "page" in str(error) else "no crash"
        raise Broken(law, f"{error}") from error
    except Exception as error:
        raise Broken("no crash", f"{type(error).__name__}: {error}, {_place(error)}") from error
    return trial


def _law_of(words: str) -> str:
    if words.startswith("order"):
        return "no request twice in a step" if "running" in words else "no request runs after it finishes"
    return "one outcome each" if words.startswith("release") else "no crash"


def _place(error: BaseException) -> str:
    """Return where an exception came from: the last line of it that is not this room's."""
    places = [(Path(f.filename).name, f.lineno) for f in inspect.getinnerframes(error.__traceback__)]  # type: ignore[arg-type]
    name, line = places[-1]
    return f"line {line} of {name}"

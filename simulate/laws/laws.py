"""The laws that every policy keeps, each a check of a scheduler at one moment of a trial.

Laws that a policy's claims suspend are checked where it claims to keep them. Nothing here changes the scheduler, drives
it (`trial.py`) or knows where cases come from (`cases.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from math import inf

from scheduling.iteration import Iteration, Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.wait_queue import tokens_to_reserve
from simulate.laws.contents import Contents

WORK = "no idle slot while a request fits"
LEAK = "no page is leaked"
PROGRESS = "progress after each preemption"
TOKENS = "the same tokens as without preemption"
REFUSED, LATE = "no request is refused", "only the late are refused"
GUARD, WINDOW = "starvation guard", "overtaking"
ONCE = "each prefix is computed once"
NAMED = 8  # requests that a message names at most


class Broken(Exception):
    """A law is broken: `law` names it, `words` say what happened."""

    def __init__(self, law: str, words: str) -> None:
        super().__init__(f"{law}: {words}")
        self.law = law
        self.words = words


def names(sequences: Collection[Sequence]) -> str:
    """Return the names of some sequences, and how many more there are."""
    more = f" and {len(sequences) - NAMED:,} more" if len(sequences) > NAMED else ""
    return ", ".join(seq.id for seq in itertools.islice(sequences, NAMED)) + more


class Books:
    """Requests that came and left, counted apart from the scheduler's own records."""

    def __init__(self) -> None:
        self.added = 0
        self.outcomes: Counter[str] = Counter()
        self.events: list[tuple[float, int]] = []  # changes of the number in system

    def arrive(self, seq: Sequence, accepted: bool) -> None:
        """Count a request that came; a refused one has its outcome."""
        self.added += 1
        if accepted:
            self.events.append((seq.arrived_at, +1))
        else:
            self.outcomes[seq.id] += 1

    def leave(self, sequences: Collection[Sequence], now: float) -> None:
        """Count requests that left."""
        self.outcomes.update(seq.id for seq in sequences)
        self.events += [(now, -1)] * len(sequences)

    def check_conservation(self, scheduler: Scheduler) -> None:
        """Every request that came waits, runs or has left."""
        running, left = len(unanswered(scheduler)), self.outcomes.total()
        if self.added != len(scheduler.waiting) + running + left:
            raise Broken(
                "no request is lost",
                f"{self.added} arrived, but {len(scheduler.waiting)} wait, {running} run and {left} finished",
            )

    def check_littles_law(self, sequences: Collection[Sequence]) -> None:
        """The number in system over time has the area of all latencies."""
        area, inside, before = 0.0, 0, 0.0
        for at, change in sorted(self.events):
            area += inside * (at - before)
            inside, before = inside + change, at
        latencies = sum((s.finished_at or 0) - s.arrived_at for s in sequences)
        if inside or abs(area - latencies) > 1e-6:
            raise Broken("Little's law", f"area {area:g}, sum of latencies {latencies:g}")


class Preemptions:
    """How many tokens the requests have generated, and how many they had when each was last preempted."""

    def __init__(self) -> None:
        self._tokens = 0
        self._at: dict[Sequence, int] = {}

    def check(self, plan: Plan) -> None:
        """Between two preemptions of a request, it or another one generates a token."""
        for seq in plan.preempted:
            if self._at.get(seq) == self._tokens:
                raise Broken(PROGRESS, f"{seq.id} is preempted again before any request has generated a token")
            self._at[seq] = self._tokens

    @property
    def stuck(self) -> list[Sequence]:
        """The requests that were preempted since the last token."""
        return [seq for seq, tokens in self._at.items() if tokens == self._tokens]

    def generate(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self._tokens += tokens


def check_contents(contents: Contents, plan: Plan) -> None:
    """Each request attends to its own text, wherever it was computed."""
    for i, (seq, count) in enumerate(zip(plan.sequences, plan.counts)):
        if not contents.compute(seq, count, plan.drafts[i] if plan.drafts else ()):
            raise Broken(
                TOKENS,
                f"in step {plan.number}, {seq.id} attends to keys and values of a different text, after "
                f"{seq.preemptions} preemptions and with {seq.computed} tokens that count as computed",
            )


def unanswered(scheduler: Scheduler) -> list[Sequence]:
    """Return the running sequences that have no answer yet."""
    return [seq for seq in scheduler.running if seq.state != "finished"]


def check_refusal(scheduler: Scheduler, seq: Sequence) -> None:
    """A policy refuses requests only if it claims to."""
    if not scheduler.policy.claims.refuses:
        raise Broken(
            REFUSED,
            f"{seq.id} with a prompt of {len(seq.prompt_ids)} tokens is refused. A policy that refuses requests "
            "must claim it: self.claims = self.claims.but(refuses=True)",
        )


def check_is_late(sequences: Collection[Sequence], refused: str) -> None:
    """A request that was refused, and accepted when the case was run again, ends after its deadline."""
    seq = next(seq for seq in sequences if seq.id == refused)
    due, ended = seq.deadline, seq.finished_at
    if seq.finish_reason == "length" and due is not None and ended is not None and ended <= due:
        raise Broken(LATE, f"{refused} is refused, but would have ended at {ended:g}, before {due:g}")


def check_guard(scheduler: Scheduler, plan: Plan, oldest: Sequence | None) -> None:
    """An order with a guard puts the oldest request first once it has waited for longer."""
    guard = scheduler.policy.claims.guard
    if oldest is None or not plan.joined or guard == inf:
        return
    waited = plan.started_at - oldest.arrived_at
    if waited > guard and plan.joined[0].arrived_at > oldest.arrived_at:
        raise Broken(
            GUARD,
            f"{oldest.id} has waited for {waited:g}, which is more than {guard:g}, and "
            f"{plan.joined[0].id} is served before it",
        )


def check_overtaking(scheduler: Scheduler, plan: Plan) -> None:
    """A request overtakes only requests that arrived shortly before it, within the window that the policy claims."""
    most = scheduler.policy.claims.overtakes
    if most == inf:
        return
    joined = [seq for seq in plan.joined if not seq.preemptions]
    last = max(joined, key=lambda seq: seq.arrived_at, default=None)
    first = min(scheduler.waiting, key=lambda seq: seq.arrived_at, default=None)
    if last is not None and first is not None and last.arrived_at - first.arrived_at > most:
        raise Broken(
            WINDOW,
            f"{last.id} joins before {first.id}, which arrived {last.arrived_at - first.arrived_at:g} before it, "
            f"more than {most:g}",
        )


def check_blocks(scheduler: Scheduler, plan: Plan) -> None:
    """No block of a prompt is computed by two requests at the same time."""
    pages, computed_by = scheduler.pages, dict[bytes, Sequence]()
    if pages is None:
        return
    for seq in scheduler.running:
        for block in seq.hashes[seq.computed // pages.page_size :] if seq.is_prefilling else ():
            other = computed_by.setdefault(block, seq)
            if other is not seq:
                raise Broken(ONCE, f"in step {plan.number}, {other.id} and {seq.id} compute the same")


def check_plan(scheduler: Scheduler, plan: Plan) -> None:
    """Slots, tokens and members of a step stay within their limits."""
    policy, running = scheduler.policy, scheduler.running
    members = [*plan.sequences, *plan.held, *plan.paused]
    twice = len(set(members)) < len(members)
    if twice or len({s.slot for s in running}) < len(running):
        raise Broken("no request twice in a step", f"step {plan.number} has {names(members)}")
    if len(running) > policy.max_batch_size:
        raise Broken("slots", f"{len(running)} requests run in {policy.max_batch_size} slots")
    for seq, count in zip(plan.sequences, plan.counts):
        if seq.is_finished or seq.state != "running":
            raise Broken("no request runs after it finishes", f"{seq.id} is finished but computes {count} tokens")
        if seq.arrived_at > plan.started_at:
            raise Broken("no request runs before it arrives", f"{seq.id} in step {plan.number}")
    for seq, count, drafts in zip(plan.sequences, plan.counts, plan.drafts):
        if drafts and (count != 1 + len(drafts) or seq.is_prefilling or len(seq.output_ids) + count > seq.max_tokens):
            raise Broken("drafts of a step", f"{seq.id} computes {count} tokens with {len(drafts)} drafts")
    if not policy.padded and sum(plan.counts) > scheduler.token_budget:
        raise Broken("tokens of a step", f"{sum(plan.counts)} computed, {scheduler.token_budget} allowed")
    if plan.held and not policy.claims.holds:
        raise Broken("slots of finished requests", f"finished requests hold slots: {names(plan.held)}")
    if not plan.sequences and not policy.claims.overruns:
        raise Broken(
            "slots of finished requests", f"a step is computed for no request; {names(plan.held)} have all their tokens"
        )


def check_conservation_of_work(scheduler: Scheduler, plan: Plan) -> None:
    """No slot stays empty while the next request in order fits, if the policy claims so."""
    policy, now = scheduler.policy, plan.started_at
    free = policy.max_batch_size - len(scheduler.running)
    if not policy.claims.conserving or not scheduler.waiting or free <= 0:
        return
    # Admission changes the prefix cache, by which an order may go, so the request at which it stopped comes first.
    first = scheduler.queue.blocked or next(iter(policy.order(scheduler.waiting, now)), None)
    if first is None:
        raise Broken(WORK, f"order() returns no request; waiting: {names(scheduler.waiting)}")
    reason, pages = scheduler.wait_clock.reason, scheduler.pages
    if reason == "kv_full" and policy.claims.limits_kv:
        return
    if reason == "kv_full" and pages is not None:
        # At least one token is left to compute, so the page of the last one is never shared.
        findable = first.hashes[: (first.length - 1) // pages.page_size]
        if pages.shareable(findable, tokens_to_reserve(policy, first)) is None:
            return
    elif reason == "token_budget":
        tokens, budget = sum(plan.counts) - sum(map(len, plan.drafts)), scheduler.token_budget
        if tokens + first.pending - policy.cached_tokens(first) > budget or tokens >= budget:
            return
    raise Broken(
        WORK,
        f"at time {now:g}, {first.id} waits while {free} slot{'s are' if free > 1 else ' is'} empty (reason: {reason})",
    )


def check_idle(scheduler: Scheduler, now: float, until: float) -> None:
    """An idle engine sleeps `until` a time no longer than the policy's patience with the oldest request."""
    waiting, patience = scheduler.waiting, scheduler.policy.claims.patience
    oldest = min(waiting, key=lambda seq: seq.arrived_at)
    latest = oldest.arrived_at + patience
    if now >= latest:
        law = "deadlines" if patience else WORK
        raise Broken(law, f"at time {now:g}, no request runs or is admitted; waiting: {names(waiting)}")
    if until <= now:
        raise Broken("deadlines", f"deadline() returned {until:g}, but at time {now:g} no request is admitted")
    if until == inf:
        raise Broken(
            "no request starves",
            f"no request runs or will arrive, and deadline() returns no time; waiting forever: {names(waiting)}",
        )
    if until > latest:
        raise Broken("deadlines", f"{oldest.id} may wait until {latest:g}, but the policy sleeps until {until:g}")


def check_answers(scheduler: Scheduler, iteration: Iteration, answered: list[Sequence], now: float) -> None:
    """The record names the requests that a step answered, each at the time of its last token unless it was held."""
    ids = sorted(seq.id for seq in answered)
    if sorted(id for id, _ in iteration.left) != ids:
        raise Broken("one outcome each", f"{ids} left, but the record has {iteration.left}")
    late = [seq for seq in answered if seq.last_token_at != now]
    if late and not scheduler.policy.claims.holds:
        raise Broken(
            "slots of finished requests",
            f"{late[0].id} got its last token at {late[0].last_token_at:g} but leaves at {now:g}",
        )


def check_resources(scheduler: Scheduler, iteration: Iteration) -> None:
    """Slot-steps add up to the slots, and only running sequences and pins hold pages."""
    spent, slots, pages = iteration.slot_steps, scheduler.policy.slots, scheduler.pages
    if abs(sum(spent) - slots) > 1e-9 or min(spent) < -1e-12:
        raise Broken("slot-steps add up", f"{spent} of {slots} slots")
    if pages is not None:
        used = scheduler.batch.pages.pinned.union(*(seq.pages for seq in scheduler.running))
        if 0 in used:
            raise Broken("pages", "a request has page 0, which is for padding")
        holding = [seq for seq in scheduler.waiting if seq.pages]
        if pages.used != len(used) or holding:
            still = f", and waiting requests have pages: {names(holding)}" if holding else ""
            raise Broken(LEAK, f"{pages.used} pages are allocated, but {len(used)} are in use{still}")


def check_all_free(scheduler: Scheduler) -> None:
    """At the end, all slots are free, and all pages but the pinned ones."""
    free, slots, pages = scheduler.batch.free_slots, scheduler.policy.max_batch_size, scheduler.pages
    if free != slots:
        raise Broken("slots", f"{free} of {slots} are free at the end")
    if pages is not None and pages.used != len(scheduler.batch.pages.pinned):
        raise Broken(LEAK, f"{pages.used} pages are never freed")

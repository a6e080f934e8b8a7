"""All upstreams of a queue: each has its own slots, scheduler and loop; all share one waiting queue and one policy.

One thread waits until an upstream has sent something or there is something to decide, and then runs the loops in turn. So
no two hooks of the policy ever run at the same time. The policy's memory, such as what each client got, spans all
upstreams, but the running requests that it sees are those of one. If several upstreams could take the next request, a
router chooses. Upstreams may come and go; while there are none, requests wait. This module must not know HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from heapq import heapify, heapreplace
from itertools import islice, takewhile
from math import ceil, inf
from typing import Any

from batching import BatchingManager
from integrations.queue.hints import Means
from integrations.queue.sites import Site, Sites
from integrations.queue.upstream import Turn, Upstream, UpstreamLoop
from routing.routers import RoutingKey
from scheduling.policy import Policy
from scheduling.reservations import ENDLESS
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from serving.inference import InferenceError
from serving.recovery import Recovery

BEAT = 0.25  # seconds after which the loops check deadlines even if nothing arrived
PATIENCE_SECONDS = 15.0  # a request waits this long while no upstream takes it
RARELY = 20  # an order is reused for this many times as long as it took to compute


class Upstreams(BatchingManager):
    """The manager of a queue; `options` are those of every manager.

    Where upstreams come and go, the first of `each` has no slots and stays, so that there is a queue without any of them.
    """

    def __init__(self, sites: Sites, clock: Callable[[], float] = time.perf_counter, **options: Any) -> None:
        self.sites = sites
        self._turns: dict[Sequence, Turn] = {}
        self.each: list[Upstream] = []
        self.on_change: Callable[[], None] = lambda: None  # called in the loops' thread when upstreams came or left
        self._clock = clock
        for site in [Site("", "", 0), *sites.all] if sites.usual else sites.all:
            self.each.append(self._make(site))
        super().__init__(self.each[0], max_batch_size=sites.slots, clock=clock, **options)
        self.inbox.rate.parallel = max(1, len(self.engines))
        self._is_changed = False  # `sites` have changed
        self._is_leaving = False  # an upstream that left still has requests
        self._number = 0  # of the latest step of any upstream
        self._looks_at = 0.0  # when to look again for requests that no upstream takes
        self.answers = Means()  # tokens of an answer
        self._order: list[Sequence] = []  # the waiting requests, as last sorted
        self._sorts_at = 0.0  # when they may be sorted again

    @property
    def engines(self) -> list[int]:
        """The slots of each upstream, if there are several."""
        return [one.slots for one in self.each if one.slots] if len(self.each) > 1 else []

    @property
    def named(self) -> list[tuple[str, int]]:
        """The name and the first slot of each upstream, if there are several."""
        return [(one.site.name, one.numbers.start) for one in self.each if one.numbers]

    def _make(self, site: Site) -> Upstream:
        """Return the model of one more upstream; its slots get the lowest numbers that no other has."""
        count, start, numbers = max(site.slots, self.sites.usual if site.name else 0), 0, None
        if self.sites.usual or len(self.sites.all) > 1:
            for taken in sorted((one.numbers for one in self.each if one.numbers), key=lambda slots: slots.start):
                if taken.start - start >= count:
                    break
                start = taken.stop
            numbers = range(start, start + count)
        return Upstream(site, self._turns, self._clock, numbers)

    def update(self, sites: list[Site]) -> None:
        """Use these upstreams from now on; any thread may call it.

        One that is not among them gets no more requests, and is dropped once those that it has are done.
        """
        with self.inbox.changed:
            self.sites.all = sites
            self._is_changed = True
            self.inbox.changed.notify()

    def _follow(self) -> None:
        """Add new upstreams, and drop those that left and have no requests."""
        with self.inbox.changed:
            sites, self._is_changed, self._is_leaving = self.sites.all, False, False
        before, names = self.max_batch_size, self.named
        for site in sites:
            if all(one.site is not site for one in self.each):
                one = self._make(site)
                self._connect(one, self.each[0].scheduler.policy)
                self.each.append(one)
        for one in self.each[1:]:
            one.is_leaving = all(site is not one.site for site in sites)
            if one.is_leaving:
                one.scheduler.batch.slot_cap = 0
                if one.scheduler.running:
                    self._is_leaving = True
                else:
                    one.scheduler.sharing.drop(one.scheduler)
                    self.each.remove(one)
        self.inbox.places.limit += self.max_batch_size - before
        self.inbox.rate.parallel = max(1, len(self.engines))
        if names != self.named:
            self.on_change()

    @property
    def slot_cap(self) -> int:
        """Return the slots of the upstreams that do not rest; those of the schedulers change within a round."""
        able = [one for one in self.each if self.scheduler is not None and one.site.may_be_asked]
        return sum(min(len(one.scheduler.batch.slots), one.slots) for one in able)

    def expect(self, turn: Turn) -> None:
        """Register a request before it is queued."""
        self._turns[turn.inference.sequence] = turn

    def forget(self, turn: Turn) -> None:
        """Forget a request that has ended."""
        with self.inbox.changed:
            self._turns.pop(turn.inference.sequence, None)
            self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        if turn.rest is not None:
            turn.rest.leave()
            turn.rest = None

    def tokens(self, turn: Turn, count: int) -> None:
        """Note that tokens of a request have passed."""
        with self.inbox.changed:
            turn.unread += count
            self._tell(turn)

    def end(self, turn: Turn, reason: str, error: InferenceError | None = None) -> None:
        """Note that a request's answer is complete, or that it failed."""
        with self.inbox.changed:
            turn.ended, turn.error = reason, error
            self._tell(turn)

    def accept(self, turn: Turn, is_whole: bool = False) -> None:
        """Note that the upstream takes a request, or has answered it; after a rest, the waiting ones may follow."""
        with self.inbox.changed:
            turn.at.site.accept(self.sites.clock(), turn.rest, is_whole)
            if turn.rest is not None:
                self._tell(turn)

    def put_back(self, turn: Turn) -> None:
        """Let a request that the upstream did not take go back to the head of the queue."""
        with self.inbox.changed:
            turn.again = True
            self._leave(turn)
            self._tell(turn)

    def _tell(self, turn: Turn) -> None:
        turn.at.tell(turn)
        self.inbox.changed.notify()

    @property
    def queued(self) -> list[Sequence]:
        """The waiting requests, those that the loops have not seen yet last."""
        # In this order, since a loop may take some of them in meanwhile.
        arrived = [inference.sequence for inference in list(self.inbox.arrived)]
        known = [] if self.scheduler is None else list(self.scheduler.waiting)
        return list(dict.fromkeys(known + arrived))

    def before(self, seq: Sequence) -> tuple[list[Sequence], float | None]:
        """Return the waiting requests ahead of this one in the policy's order, and the seconds until it gets a slot.

        They are None while the time of a token is unknown. The request may be one that does not wait yet. An order of a long
        queue takes a while, so it is reused for a multiple of that: one that it lacks and that does not wait is then the last.
        """
        first, now, waiting = self.each[0].scheduler, self._clock(), dict.fromkeys(self.queued)
        if now >= self._sorts_at or (seq in waiting and seq not in self._order):
            self._order = first.queue.in_order(first.policy, first.sharing.running, [*waiting, seq], now)
            self._sorts_at = now + RARELY * (self._clock() - now)
        sooner = [one for one in takewhile(lambda one: one is not seq, self._order) if one in waiting]
        # The tokens until each slot is free, if all get as many at a time.
        left = [max(1.0, self._expected(one) - max(one.computed, len(one.output_ids))) for one in first.sharing.running]
        left += [0] * (sum(one.slots for one in self.each) - len(left))
        if not left or not self.inbox.rate.is_known:
            return sooner, None
        heapify(left)
        for one in sooner:
            heapreplace(left, left[0] + self._expected(one))
        return sooner, self.inbox.rate.seconds_for(round(left[0] * len(left)))

    def _expected(self, seq: Sequence) -> float:
        """Return how many tokens a request may have; where it names no length, as many as earlier answers of its model."""
        mean = self.answers.of(seq.adapter) if seq.open_ended else 0.0
        return len(seq.prompt_ids) + mean * seq.slots if mean else seq.total

    def assemble(self, policy: Policy) -> Callable[[], bool]:
        """Make a scheduler and a loop for each upstream; return what runs those that have something to do."""
        for one in self.each:
            self._connect(one, policy)
        self.scheduler = self.each[0].scheduler
        return self._round

    def _connect(self, one: Upstream, policy: Policy) -> None:
        one.scheduler = Scheduler(policy, None, self.max_tokens_per_step, slots=one.numbers)
        one.scheduler.queue.is_closed_to = one.is_closed_to
        if one is not self.each[0]:
            one.scheduler.share(self.each[0].scheduler)
        one.loop = self.loop(one.scheduler, Recovery(one, self._make_probe, self._clock), UpstreamLoop)
        one.loop.waits = False

    def _round(self) -> bool:
        """Wait until there is something to do, and do it; return False to end."""
        due = self._wait()
        if self._is_changed or self._is_leaving:
            self._follow()
        if self._clock() >= self._looks_at:
            self._looks_at = self._clock() + BEAT
            self._give_up()
        self.each[0].loop.drain_inbox()  # arrivals are estimated with the free slots of all
        # Who joins where is decided below; a closed loop takes its batch at once, and one upstream needs no router.
        one_by_one = bool(self.engines) and not self.each[0].scheduler.policy.closed
        self._open(() if one_by_one else self.each)
        going = all(self._step(one) for one in due or self.each[:1])
        while going and (able := self._able()):
            for one in self._routed(able, one_by_one):
                count = one.let_through  # one that is answered at once may run no more after its step
                one.scheduler.batch.slot_cap = len(one.scheduler.running) + 1 if one_by_one else self._most(one)
                going = self._step(one)
                if one_by_one:
                    one.scheduler.batch.slot_cap = 0
                if not going or one.let_through > count:
                    break
            else:
                break
        self._open(self.each)
        return going

    def _give_up(self) -> None:
        """End the waiting requests that no upstream takes for longer than a request waits."""
        if not any(site.rests for site in self.sites.all):
            return
        for seq in list(self.each[0].scheduler.waiting):
            turn = self._turns.get(seq)
            if turn is None or (held := self.sites.refusal(turn.whose, turn.tried)) is None or self.is_patient(turn):
                continue
            seconds = max(1, ceil(held[0].until - self.sites.clock()))
            text = f"no upstream takes this request now: {held[0].why}. Try again in {seconds} s"
            kind = "overloaded" if any(site.rest is None for site in self.sites.all) else "unavailable_error"
            turn.inference.cancel(InferenceError(kind, text, seconds))

    def is_patient(self, turn: Turn) -> bool:
        """Return whether a request may wait until an upstream takes it."""
        now, held = self.sites.clock(), self.sites.refusal(turn.whose, turn.tried)
        since = turn.refused_at if held is None else min(turn.refused_at, max(held[1], turn.arrived))
        return max(now, held[0].until if held else now) - since < PATIENCE_SECONDS

    def _open(self, able: Iterable[Upstream]) -> None:
        """Let requests through to these upstreams only; none of them rests."""
        for one in self.each:
            batch = one.scheduler.batch
            # A server of our own computes more answers than it has slots one after another.
            batch.slot_cap, batch.most, batch.most_alone = 0, one.slots, ENDLESS if one.site.own else one.slots
        for one in able:
            one.scheduler.batch.slot_cap = self._most(one)

    def _most(self, one: Upstream) -> int:
        """Return how many requests an upstream may have now: none while it rests, and later one more at a time.

        So each is seen to try before the next one may. A closed loop needs its batch at once.
        """
        if not one.site.may_be_asked:
            return 0
        is_free = not one.site.rests or (one.scheduler.policy.closed and one.site.failing is None)
        return one.slots if is_free else min(one.slots, len(one.scheduler.running) + 1)

    def _able(self) -> list[Upstream]:
        """Return the upstreams that can take a waiting request."""
        return [
            one for one in self.each
            if one.scheduler.waiting and len(one.scheduler.running) < min(self._most(one), len(one.scheduler.batch.slots))
        ]  # fmt: skip

    def _routed(self, able: list[Upstream], one_by_one: bool) -> Iterable[Upstream]:
        """Return these upstreams, best first for the next request."""
        remembers = self.sites.router in ("prefix-aware", "session-sticky")  # it must see each request
        if len(able) < 2 and not (able and one_by_one and remembers):
            return able
        turn, first = None, able[0].scheduler
        if one_by_one:
            try:
                order = first.policy.order(first.waiting, self._clock())
                some = islice(order, len(first.waiting))  # it may yield one again that does not join
                seq = next((seq for seq in some if not all(one.is_closed_to(seq) for one in able)), None)
                turn = None if seq is None else self._turns.get(seq)
            except BaseException:  # the loop that asks next handles it
                return able
        load = [one.scheduler.batch.taken for one in able]
        key = turn.routing_key if turn else RoutingKey()
        return [able[i] for i in self.sites.order([one.site for one in able], load, key)]

    def _step(self, one: Upstream) -> bool:
        """Run an iteration of a loop. Steps of all upstreams are numbered together."""
        one.scheduler.number = self._number
        going = one.loop.step()
        self._number = one.scheduler.number
        if not one.scheduler.running:
            one.due = inf  # only requests that have left got something
        return going

    def _wait(self) -> list[Upstream]:
        """Return the upstreams that have a step to take, once there is one or something else to do."""
        changed, end = self.inbox.changed, self._until()
        with changed:
            while True:
                now = self._clock()
                due = [one for one in self.each if one.due <= now]
                if due or self.inbox.arrived or self.inbox.is_urgent or self._is_changed or now >= end:
                    return due
                changed.wait(min([end, *(one.due for one in self.each)]) - now)

    def _until(self) -> float:
        """Return when to check the queue even if nothing arrives: for a deadline, or when an upstream's rest ends."""
        now, rested = self._clock(), self.sites.clock()
        times = [now + BEAT]
        for one in self.each:
            times += [now + rest.until - rested for rest in one.site.rests.values() if rest.until > rested]
            if one.site.rest is None and not one.scheduler.running:
                times.append(now + one.loop.idle_seconds(now))
        return min(times)

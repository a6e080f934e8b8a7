"""All upstreams of a queue: each has its own slots, scheduler and loop; all share one waiting queue and one policy.

One thread waits until an upstream has sent something or there is something to decide, and then runs the loops in turn. So
no two hooks of the policy ever run at the same time. The policy's memory, such as what each client got, spans all
upstreams, but the running requests that it sees are those of one. If several upstreams could take the next request, a
router chooses. Upstreams may come and go; while there are none, requests wait. This module must not know HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from math import inf
from typing import Any

from batching import BatchingManager
from fleet.routers import Asked
from front.sites import REST_SECONDS, Site, Sites
from front.upstream import Turn, Upstream
from scheduling.policy import Policy
from scheduling.reservations import ENDLESS
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from serving.inference import InferenceError
from serving.recovery import Recovery

BEAT = 0.25  # seconds after which the loops check deadlines even if nothing arrived
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
        return Upstream(site, self._turns, self._clock, numbers=numbers)

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
        now = self.sites.clock()
        able = [one for one in self.each if self.scheduler is not None and one.site.rests_until <= now]
        return sum(min(len(one.scheduler.batch.slots), one.slots) for one in able)

    def expect(self, turn: Turn) -> None:
        """Register a request before it is queued."""
        self._turns[turn.inference.sequence] = turn

    def forget(self, turn: Turn) -> None:
        """Forget a request that has ended."""
        self._turns.pop(turn.inference.sequence, None)

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

    def refuse(self, turn: Turn) -> None:
        """Note that the upstream did not take a request: it goes back to the head of the queue."""
        with self.inbox.changed:
            turn.again = True
            self._tell(turn)

    def accept(self, turn: Turn) -> None:
        """Note that an upstream takes requests again after refusing some: the waiting ones may follow."""
        with self.inbox.changed:
            turn.probes, turn.at.site.refuses_since, turn.at.site.tries = False, inf, 1
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

    def before(self, seq: Sequence) -> tuple[list[Sequence], float]:
        """Return the waiting requests ahead of this one in the policy's order, and the seconds that they take.

        The request may be one that does not wait yet. An order of a long queue takes a while, so it is reused for a multiple
        of that: one that it lacks and that does not wait is then the last.
        """
        first, now, waiting = self.each[0].scheduler, self._clock(), dict.fromkeys(self.queued)
        if now >= self._sorts_at or (seq in waiting and seq not in self._order):
            self._order = first.queue.in_order(first.policy, first.sharing.running, [*waiting, seq], now)
            self._sorts_at = now + RARELY * (self._clock() - now)
        sooner = [one for one in takewhile(lambda one: one is not seq, self._order) if one in waiting]
        return sooner, self.inbox.rate.seconds_for(sum(one.total for one in sooner))

    def assemble(self, policy: Policy) -> Callable[[], bool]:
        """Make a scheduler and a loop for each upstream; return what runs those that have something to do."""
        for one in self.each:
            self._connect(one, policy)
        self.scheduler = self.each[0].scheduler
        return self._round

    def _connect(self, one: Upstream, policy: Policy) -> None:
        one.scheduler = Scheduler(policy, None, self.max_tokens_per_step, slots=one.numbers)
        if one is not self.each[0]:
            self.each[0].scheduler.sharing.take(one.scheduler)
        one.loop = self.loop(one.scheduler, Recovery(one, self._make_probe, self._clock))
        one.loop.waits = False

    def _round(self) -> bool:
        """Wait until there is something to do, and do it; return False to end."""
        due = self._wait()
        if self._is_changed or self._is_leaving:
            self._follow()
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

    def _open(self, able: Iterable[Upstream]) -> None:
        """Let requests through to these upstreams only; none of them rests."""
        for one in self.each:
            batch = one.scheduler.batch
            # A server of our own computes more answers than it has slots one after another.
            batch.slot_cap, batch.most, batch.most_alone = 0, one.slots, ENDLESS if one.site.own else one.slots
        for one in able:
            one.scheduler.batch.slot_cap = self._most(one)

    def _most(self, one: Upstream) -> int:
        """Return how many requests an upstream may have now: none while it rests, and then one more than it has taken.

        That one finds out whether it takes requests again, which it does if it does not refuse that one within a moment. After
        each rest that an upstream asks for, one more may try beside it.
        """
        if one.site.rests_until > self.sites.clock():
            return 0
        if one.site.refuses_since == inf or one.scheduler.policy.closed:
            return one.slots
        since = self._clock() - REST_SECONDS
        turns = [turn for seq in one.scheduler.running if (turn := self._turns.get(seq)) is not None]
        return min(one.slots, one.site.tries + sum(turn.begun_at < since or not turn.probes for turn in turns))

    def _able(self) -> list[Upstream]:
        """Return the upstreams that can take a waiting request."""
        return [
            one for one in self.each
            if one.scheduler.waiting and len(one.scheduler.running) < min(self._most(one), len(one.scheduler.batch.slots))
        ]  # fmt: skip

    def _routed(self, able: list[Upstream], one_by_one: bool) -> Iterable[Upstream]:
        """Return these upstreams, best first for the next request."""
        if len(able) < 2 and not (able and one_by_one and self.sites.remembers):
            return able
        turn, first = None, able[0].scheduler
        if one_by_one:
            try:
                seq = next(iter(first.policy.order(first.waiting, self._clock())), None)
                turn = None if seq is None else self._turns.get(seq)
            except BaseException:  # the loop that asks next handles it
                return able
        load = [one.scheduler.batch.taken for one in able]
        return [able[i] for i in self.sites.order([one.site for one in able], load, turn.asked if turn else Asked())]

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
            if one.site.rests_until > rested:
                times.append(now + one.site.rests_until - rested)
            elif not one.scheduler.running:
                times.append(now + one.loop.idle_seconds(now))
        return min(times)

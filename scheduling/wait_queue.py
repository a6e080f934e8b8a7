"""The queue: who waits, for which reason, and who joins the batch next.

The policy decides; this module must not know steps, tokens, or why a sequence leaves the batch.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import count
from math import inf
from typing import Any, NoReturn

from scheduling.batch import RunningBatch
from scheduling.hooks import Hooks
from scheduling.policy import Budget, Policy, PolicyError
from scheduling.sequence import Sequence
from scheduling.waiting import WaitClock


class Waiting(OrderedDict[Sequence, None]):
    """The requests that wait, which a hook reads as a list; the queue finds and takes out any of them at once."""

    put, take = OrderedDict.__setitem__, OrderedDict.__delitem__  # for the queue alone

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(list(self), name)  # whatever else a list can be asked

    def __repr__(self) -> str:
        return repr(list(self))

    def _refuse(self, *args: object, **more: object) -> NoReturn:
        raise TypeError(
            "a hook cannot change `waiting`, which is the queue itself. Use sorted(waiting, key=...), or list(waiting)"
        )

    sort = append = insert = extend = remove = reverse = _refuse
    pop = popitem = clear = update = setdefault = __setitem__ = __delitem__ = _refuse


class WaitQueue:
    """`waiting` is in order of arrival, except that preempted sequences go first."""

    def __init__(self, batch: RunningBatch) -> None:
        self.batch = batch
        self.waiting = Waiting()
        self.clock = WaitClock()
        self.blocked: Sequence | None = None  # the first in order that could not join, if one ended the last admission
        self.joined: list[Sequence] = []  # those that have joined since the last plan
        self.recomputes = False  # a sequence has joined whose tokens were computed before
        self.is_closed_to: Callable[[Sequence], bool] | None = None  # which to pass over, whatever the policy says
        self.expiries: list[tuple[float, int, Sequence]] = []  # a heap, with entries of sequences that have left
        self._numbers = count()

    def share(self, other: WaitQueue) -> None:
        """Have the same sequences wait here and there."""
        self.waiting, self.clock, self.expiries = other.waiting, other.clock, other.expiries
        self._numbers = other._numbers

    def arrive(self, seq: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.put(seq, None)
        self.clock.arrive(seq, seq.arrived_at)

    def in_order(
        self, policy: Policy, running: Iterable[Sequence], new: Iterable[Sequence], now: float
    ) -> list[Sequence]:
        """Return the waiting requests and `new` in the policy's order, next to join first; any thread may call it.

        This sorts by a copy of the policy, since an order may change the policy's memory. If that fails, or another thread
        changes the policy meanwhile, the order is that of arrival, as it is for the requests that the policy holds back.
        """
        waiting = Waiting()
        for seq in list(self.waiting):
            waiting.put(seq, None)
        new = [seq for seq in new if seq not in waiting]
        try:
            policy = deepcopy(policy, {id(one): one for one in (self.batch.pages, *new, *waiting, *running)})
            for seq in new:
                waiting.put(seq, None)
                policy.on_arrival(seq, now)
            first = [seq for seq in policy.order(waiting, now) if seq in waiting]
        except BaseException:
            first = []
        return list(dict.fromkeys([*first, *waiting, *new]))

    def requeue(self, sequences: list[Sequence], now: float) -> None:
        """Put sequences that lost their slots before all that wait, the first to arrive first."""
        for seq in sorted(sequences, key=lambda seq: seq.arrived_at, reverse=True):
            seq.preempt()
            self.waiting.put(seq, None)
            self.waiting.move_to_end(seq, last=False)
            self.clock.arrive(seq, now)

    def withdraw(self, sequences: Iterable[Sequence], now: float) -> None:
        """Take sequences out of the queue that will not join."""
        for seq in sequences:
            self.waiting.take(seq)
            self.clock.leave(seq, now)

    def expire_at(self, seq: Sequence, at: float) -> None:
        """Let a waiting sequence leave at this time unless it has joined by then."""
        if at < inf:
            heapq.heappush(self.expiries, (at, next(self._numbers), seq))

    def next_expiry(self) -> float | None:
        """Return when the next waiting sequence expires, None if none does."""
        while self.expiries:
            at, _, seq = self.expiries[0]
            # A preempted sequence waits, too, but it has joined in time, and part of its answer may have been sent.
            if seq in self.waiting and seq.scheduled_at is None:
                return at
            heapq.heappop(self.expiries)
        return None

    def expire(self, now: float) -> list[Sequence]:
        """Turn the sequences away that have expired; return them."""
        expired: list[Sequence] = []
        while (at := self.next_expiry()) is not None and at <= now:
            seq = heapq.heappop(self.expiries)[2]
            self.withdraw([seq], now)
            seq.state, seq.finish_reason, seq.finished_at = "finished", "refused", now
            expired.append(seq)
        return expired

    def wake_at(self, policy: Policy, now: float) -> float | None:
        """Return when to ask the policy again although nothing arrives; None to sleep until something does."""
        if not self.waiting or self.batch.running:
            return None
        times = (policy.deadline(self.waiting, now), self.next_expiry())
        return min((at for at in times if at is not None), default=None)

    def admit(self, policy: Policy, hooks: Hooks, token_budget: int, step: int, now: float) -> None:
        """Give slots and pages to the sequences that the policy lets join in this step, and add them to `joined`."""
        self.blocked = None
        if not self.batch.free_slots:
            self.clock.reason = "slots_full"
            return
        budget = self.batch.budget(token_budget)
        n = min(policy.admit(self.waiting, self.batch.running, budget, now), budget.slots)
        # Those that join stay in `waiting` until the end: `order` may be a generator that goes through it.
        joined: list[Sequence] = []
        try:
            reason = self._join(joined, n, policy, hooks, budget, step, now)
        finally:  # whatever a hook raises, a sequence either waits or runs
            for seq in joined:
                self.waiting.take(seq)
            self.joined += joined
        if self.waiting:
            self.clock.reason = reason or self._why_waiting(policy, now)

    def _join(
        self, joined: list[Sequence], n: int, policy: Policy, hooks: Hooks, budget: Budget, step: int, now: float
    ) -> str | None:
        """Let `n` sequences join in the policy's order; return what keeps the next one from it, if anything does."""
        passed_over: set[Sequence] = set()
        for seq in policy.order(self.waiting, now) if n > 0 else ():
            if seq not in self.waiting or seq.state != "waiting":
                raise PolicyError(f"order: {seq.id} is {seq.state}, not in the queue")
            if self.is_closed_to is not None and self.is_closed_to(seq):
                if seq in passed_over:  # a generator that waits until it joins
                    break
                passed_over.add(seq)
                continue
            reason = policy.blocked_by(seq, self.batch.running, budget) if hooks.blocks else None
            if not self.batch.fits(seq):
                reason = "slots_full"
            if reason is None and not self.batch.join(seq, tokens_to_reserve(policy, seq)):
                reason = "kv_full"
            if reason is not None:
                self.blocked = seq
                return reason
            joined.append(seq)
            self._note_join(seq, step, now)
            policy.on_admit(seq, now)
            if len(joined) == n:
                break
            if hooks.blocks:  # nothing else looks at the budget
                budget = self.batch.budget(budget.tokens)
        return None

    def _note_join(self, seq: Sequence, step: int, now: float) -> None:
        self.clock.leave(seq, now)
        self.recomputes = self.recomputes or seq.recompute_until > 0
        # One that was preempted has been scheduled before.
        if seq.scheduled_at is None:
            seq.scheduled_at = now
            seq.first_iteration = step

    def _why_waiting(self, policy: Policy, now: float) -> str:
        if not self.batch.free_slots:
            return "slots_full"
        return "window" if self.wake_at(policy, now) is not None else "policy_order"


def tokens_to_reserve(policy: Policy, seq: Sequence) -> int:
    """Return for how many tokens a sequence gets pages when it joins, one more than it has at least."""
    # Its first step gives it a token, whose page a runner needs if it launches the next step ahead.
    return min(seq.total, max(seq.length + 1, policy.reserve_tokens(seq)))

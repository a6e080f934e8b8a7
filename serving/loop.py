"""The batching loop, one iteration at a time: drain the inbox, plan, compute, commit, publish.

This module must not know HTTP, tensors, threads other than its own, or which policy it runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import ParamSpec

from scheduling.iteration import Iteration, Plan
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler
from scheduling.sequence import Sequence
from serving.background import Background
from serving.deadlines import Deadlines
from serving.dedup import Dedup
from serving.fallback import Fallback, Lease, switch_problem
from serving.inbox import MAX_RETRY_SECONDS, Inbox
from serving.inference import Inference, InferenceError, failure
from serving.recovery import Recovery

log = logging.getLogger(__name__)

Observer = Callable[[Iteration | None, list[Inference]], None]
Listener = Callable[[Inference], None]
P = ParamSpec("P")
MAX_IDLE_SECONDS = 1.0  # between two heartbeats


@dataclass(slots=True)
class Loop:
    """The loop of one scheduler: each iteration computes one step of the sequences that the policy admits.

    Where several share a queue, one thread runs their loops in turn; `waits` is false then, and that thread waits itself.
    It shares only the inbox with other threads. After each step it calls the observers with the step's record and the
    inferences that left; if any left, it first calls `on_leave`.
    """

    scheduler: Scheduler
    inbox: Inbox
    deadlines: Deadlines
    recovery: Recovery
    observers: list[Observer]
    on_leave: list[Observer]
    clock: Callable[[], float]
    dedup: Dedup | None = None  # None: each inference is computed
    fallback: Fallback = field(default_factory=Fallback)
    background: Background = field(default_factory=Background)
    waits: bool = True  # for work, in an iteration after one without any
    is_idle: bool = False  # whether the last iteration had nothing to compute

    def step(self) -> bool:
        """Run one iteration; return False to end the loop."""
        self.drain_inbox()
        if self.inbox.is_stopping:
            return False
        plan = self._plan()
        if plan is not None:
            self.commit(plan, self.recovery.compute(self.scheduler, plan))
        if self.scheduler.sharing.errors or self.recovery.is_suspect:
            self._mend()
        return True

    def commit(self, plan: Plan, outputs: list[Output]) -> None:
        """Take in the outputs of a step, and tell those who wait for them."""
        iteration = self.scheduler.commit(plan, outputs, self.clock())
        self.inbox.rate.add(iteration.tokens, iteration.seconds)
        # Completing a request notifies its reader as well.
        for inference in self.inbox.streams.values():
            if inference.sequence.last_iteration == plan.number and inference.sequence.finish_reason is None:
                inference.publish_tokens()
        if self.dedup is not None and self.dedup.shared:
            self.dedup.publish(plan)
        left = chain(plan.sequences, plan.held) if iteration.left else ()
        self._complete([seq for seq in left if seq.state == "finished"], iteration)

    def _mend(self) -> None:
        """Leave a policy that failed, and try an engine that did."""
        if self.scheduler.sharing.errors:
            self._go_back(self.scheduler.sharing.errors[0])
        if self.recovery.is_suspect:
            self.recovery.probe()

    def _plan(self) -> Plan | None:
        """Return the plan of the next step, by the policy before if the active one fails."""
        while True:
            try:
                plan, error = self.scheduler.plan(self.clock()), None
            except BaseException as raised:
                plan, error = None, raised
            if self.scheduler.refused:
                self._refuse(self.scheduler.refused)
            if error is None:
                break
            self._go_back(error)
        self.is_idle = plan is None
        if plan is not None and plan.joined:
            # Before the step, so that the queue has room for tokens while it is computed.
            self.inbox.start(plan)
        return plan

    @property
    def _slots(self) -> int:
        return self.scheduler.sharing.slots(self.scheduler.policy.max_batch_size)

    def _go_back(self, error: BaseException | None = None) -> None:
        """Return to the policy before the one that raised an error, or whose lease ended; raise the error if there is none."""
        slots = self._slots
        self._follow(slots, self.fallback.go_back(self.scheduler, error, self.clock()))
        self.is_idle = False  # the other policy may let requests join at once

    def _switch(self, policy: Policy | None, lease: Lease | None) -> None:
        """Switch to another policy, or without one end a lease; raise InferenceError, without a switch, if it fails at once."""
        if policy is None:
            if self.fallback.is_ended_by(lease):
                self._go_back()
            return
        slots = self._slots
        try:
            left = self.fallback.switch(self.scheduler, policy, self.clock(), lease)
        except InferenceError:
            raise
        except BaseException as error:
            raise InferenceError("invalid_request_error", switch_problem(error, policy)) from error
        self._follow(slots, left)

    def _follow(self, slots: int, left: list[Sequence]) -> None:
        """Let as many requests wait as under the old policy, which had `slots`, and complete the sequences that left."""
        # Only the loop's thread changes the limit. It may fall below what is taken; then nobody enters for a while.
        self.inbox.places.limit += self._slots - slots
        self._complete(left)
        notify(self.fallback.listeners)

    def drain_inbox(self) -> None:
        """Pass arrivals, cancellations and policy switches to the scheduler. An idle loop waits for them."""
        self.inbox.heartbeat = now = self.clock()
        if self.is_idle and self.waits:
            self.inbox.wait(self.idle_seconds(now))
            self.inbox.heartbeat = now = self.clock()
        if self.inbox.has_news or self.deadlines.next_at <= now:
            self._take_in(now)
        if self.fallback.ends_at <= now:
            self._go_back()
        if self.background.waiting or self.background.admitted:
            self._complete(self.background.yield_slots(self.scheduler, now, self._add))

    def _take_in(self, now: float) -> None:
        """Pass on what the other threads left in the inbox, and the requests that are past a deadline."""
        # Arrivals first: an inference may have been canceled before the loop knew it, and must be known to be removed.
        arrived, ended = self.inbox.take()
        for inference in arrived:
            self._receive(inference)
            inference.receive(self.scheduler.policy.estimates)
            if inference.is_finished:
                ended.append(inference)
        ended += self.deadlines.expire(now)
        self.deadlines.prune(len(self.inbox.open))
        if ended:
            self._remove(ended, now)
        # After the removals, so that a new policy does not take over what has ended.
        self.inbox.switch_policies(self._switch)

    def idle_seconds(self, now: float) -> float:
        """Return the seconds until the policy's next deadline, a request's, or the next heartbeat."""
        wake_at, end = self._wake_at(now), min(self.deadlines.next_at, self.fallback.ends_at, now + MAX_IDLE_SECONDS)
        return max(0.0, (end if wake_at is None else min(wake_at, end)) - now)

    def _wake_at(self, now: float) -> float | None:
        """Return the policy's next deadline; now if it fails, since the one before may have requests join."""
        try:
            return self.scheduler.wake_at(now)
        except BaseException as error:
            self._go_back(error)
            return now

    def _receive(self, inference: Inference) -> None:
        """Hand an arrival to the scheduler, to deduplication or to background work."""
        if not inference.is_background:
            self.deadlines.add(inference)
        if inference.first is not None and self.dedup is not None:
            if self.dedup.add(inference):
                self._complete([inference.sequence])
        elif inference.is_background:
            self.background.add(inference)
        else:
            self._add(inference)

    def _add(self, inference: Inference) -> None:
        """Add an inference to the scheduler, or complete it if the policy refuses it."""
        if self._accepts(inference.sequence):
            return
        seq, name = inference.sequence, self.scheduler.policy.name
        why, retry_after = "accepts no more requests from this client for now. Try again later", 60
        if seq.estimate is not None:
            wait, total = (at - seq.arrived_at for at in seq.estimate)
            why = f"expects the answer in {total:.1f} s, which is too late. Try again later, or raise slo_s"
            retry_after = max(1, min(MAX_RETRY_SECONDS, math.ceil(wait)))
        seq.error = InferenceError("overloaded", f"the policy {name} {why}", retry_after)
        self._complete([seq])

    def _accepts(self, seq: Sequence) -> bool:
        """Add a sequence to the scheduler; return False if the policy refuses it."""
        # A hook may fail after the sequence has entered the queue; adding it again would queue it twice.
        while seq not in self.scheduler.waiting:
            try:
                return self.scheduler.add(seq)
            except BaseException as error:
                self._go_back(error)
        return True

    def _refuse(self, expired: list[Sequence]) -> None:
        """Complete requests that the policy turns away after they have waited."""
        for seq in expired:
            seq.error = InferenceError(
                "timeout_error",
                f"timed out in the queue of the policy {self.scheduler.policy.name}. Try again later, or raise its timeout",
            )
        self._complete(expired)

    def _remove(self, ended: list[Inference], now: float) -> None:
        """Remove inferences that ended before their last token from the scheduler, in one pass for each reason."""
        outside: list[Sequence] = []
        if self.dedup is not None:
            ended, outside = self.dedup.release(ended, now)
        outside += self.background.release(ended, now)
        if outside:
            self._complete(outside)
        for reason, has_error in (("length", False), ("abort", True)):
            # A dict, because one may be here twice. One that has left meanwhile or has not arrived yet is not open.
            sequences = {i.sequence: None for i in ended if (i.error is not None) == has_error}
            leaving = [seq for seq in sequences if seq in self.inbox.open]
            if leaving:
                self._complete(self.scheduler.remove_all(leaving, now, reason))

    def _complete(self, sequences: list[Sequence], iteration: Iteration | None = None) -> None:
        """Complete the requests of sequences that left the scheduler, in one pass and without blocking."""
        left: list[Inference] = []
        if sequences:
            left = self.inbox.finish(sequences if self.dedup is None else self.dedup.settle(sequences))
        # Observers first: when a handler wakes up, its request has been counted and recorded.
        if left:
            notify(self.on_leave, iteration, left)
        notify(self.observers, iteration, left)
        if left:
            complete(left)


def notify(callbacks: Iterable[Callable[P, None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call each callback; log its exception and go on."""
    for callback in callbacks:
        try:
            callback(*args, **kwargs)
        except Exception:
            log.exception("%s failed", getattr(callback, "__qualname__", callback))


def complete(inferences: list[Inference]) -> None:
    """End each inference with its sequence's error, if there is one."""
    for inference in inferences:
        try:
            inference.finished(failure(inference.sequence.error))
        except Exception:  # the others must end too
            log.exception("cannot complete an inference")

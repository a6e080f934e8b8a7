"""The loop that every policy shares: plan an iteration, have it computed, take in what came out.

The server drives it with a model and `time.perf_counter`, the simulator with a cost and a virtual clock. It must
not know threads, HTTP, tensors, or which of the two it is in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from scheduling.iteration import Iteration, Member, Plan, SlotSteps
from scheduling.pages import PagePool
from scheduling.policy import Policy, Room
from scheduling.sequence import Sequence
from scheduling.waiting import WaitClock


class Token(NamedTuple):
    """A token with what else is known of it; `prompt_details` belong to prompt tokens of the same step."""

    id: int | None
    detail: Any = None
    prompt_details: list[Any] | None = None


Output = int | Token | BaseException | None  # a token, the row's own failure, or nothing due
Forward = Callable[[Plan], list[Output]]


class Scheduler:
    """Sequences wait, run and leave; the policy decides, this keeps the books.

    `max_tokens_per_step` bounds the tokens of one step for policies that are not padded; prompts are cut to it.
    """

    def __init__(
        self, policy: Policy, pages: PagePool | None = None, max_tokens_per_step: int = 2048
    ) -> None:
        self.policy = policy
        self.pages = pages
        self.max_tokens_per_step = max(max_tokens_per_step, policy.max_batch_size)
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: list[Sequence] = []
        self.number = 0
        self._free_slots = list(range(policy.max_batch_size))
        self._wait_clock = WaitClock()

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait; its `arrived_at` must be set, and `pages.can_ever_hold` it."""
        if self.pages is not None and not seq.hashes:
            seq.hashes = self.pages.hashes(seq.prompt_ids)
        self.waiting[seq] = None
        self._wait_clock.arrive(seq)
        self.policy.on_arrival(seq, seq.arrived_at)

    def step(self, forward: Forward, clock: Callable[[], float]) -> Iteration | None:
        """Run one iteration; None when the policy lets everybody wait."""
        plan = self.plan(clock())
        if plan is None:
            return None
        return self.commit(plan, forward(plan), clock())

    def plan(self, now: float) -> Plan | None:
        """Admit who may join and return what the next step computes, None if nothing."""
        self._wait_clock.tick(now, self.number)
        joined = self._admit(now)
        if not self.running:
            return None
        live = [seq for seq in self.running if not seq.is_finished]
        padded = self.policy.padded
        budget = self.max_tokens_per_step
        counts = [seq.pending for seq in live] if padded else self.policy.share(live, budget)
        self.number += 1
        return Plan(
            number=self.number,
            started_at=now,
            sequences=[seq for seq, count in zip(live, counts) if count],
            counts=[count for count in counts if count],
            held=[seq for seq in self.running if seq.is_finished],
            padded=padded,
            joined=joined,
        )

    def wake_at(self, now: float) -> float | None:
        """Return when to plan again though nothing arrives; None to sleep until something does."""
        return (
            self.policy.deadline(self.waiting, now) if self.waiting and not self.running else None
        )

    def _admit(self, now: float) -> list[Sequence]:
        if not self.waiting:
            return []
        kv_tokens = self.pages.free * self.pages.page_size if self.pages else 1 << 60
        room = Room(len(self._free_slots), kv_tokens)
        n = min(self.policy.admit(self.waiting, self.running, room, now), room.slots)
        joined: list[Sequence] = []
        kv_full = False
        for seq in list(islice(self.policy.order(self.waiting, now), n)) if n > 0 else ():
            if not self._reserve(seq):
                kv_full = True
                break
            self._join(seq, now)
            joined.append(seq)
        if self.waiting:
            self._wait_clock.reason = self._why_waiting(kv_full, now)
        return joined

    def _why_waiting(self, kv_full: bool, now: float) -> str:
        if kv_full:
            return "kv_full"
        if not self._free_slots:
            return "slots_full"
        return "window" if self.wake_at(now) is not None else "policy_order"

    def _reserve(self, seq: Sequence) -> bool:
        if self.pages is None:
            return True
        found = self.pages.reserve(seq.hashes, seq.total, len(seq.prompt_ids))
        if found is None:
            return False
        seq.pages, seq.cached = found
        seq.computed = seq.cached
        return True

    def _join(self, seq: Sequence, now: float) -> None:
        del self.waiting[seq]
        self._wait_clock.leave(seq, now)
        seq.slot = heapq.heappop(self._free_slots)
        seq.state = "running"
        seq.scheduled_at = now
        seq.first_iteration = self.number + 1
        self.running.append(seq)

    def commit(self, plan: Plan, outputs: list[Output], now: float) -> Iteration:
        """Take in the outputs of a step that was computed; return its record.

        A step is a transaction: until this call no sequence has moved, so a failed one can be tried again.
        """
        batch = len(plan.sequences) + len(plan.held)
        members = []
        for seq, count, output in zip(plan.sequences, plan.counts, outputs):
            phase = "prefill" if seq.is_prefilling else "decode"
            self._advance(seq, count, output, now)
            seq.last_iteration = plan.number
            seq.batch_sum += batch
            seq.batch_max = max(seq.batch_max, batch)
            members.append(Member(seq.id, seq.slot, phase, count, seq.computed, seq.total))
        for seq in plan.held:
            members.append(Member(seq.id, seq.slot, "held", 0, seq.computed, seq.total))
        failed = [seq for seq in plan.sequences if seq.error is not None]
        leaving = failed + [s for s in self.policy.release(self.running) if s.error is None]
        left = [(seq.id, seq.finish_reason or "abort") for seq in leaving]
        used, total = (self.pages.used, self.pages.total) if self.pages else (0, 0)
        for seq in leaving:
            self._leave(seq, now)
        return Iteration(
            n=plan.number,
            t=plan.started_at,
            seconds=now - plan.started_at,
            policy=self.policy.name,
            queue=len(self.waiting),
            members=members,
            joined=[seq.id for seq in plan.joined],
            left=left,
            slot_steps=self._slot_steps(plan),
            pages_used=used,
            pages_total=total,
        )

    def _advance(self, seq: Sequence, count: int, output: Output, now: float) -> None:
        seq.computed += count
        if isinstance(output, BaseException):
            seq.error, seq.finish_reason = output, "abort"
            return
        detail = None
        if isinstance(output, Token):
            seq.prompt_details += output.prompt_details or ()
            detail, output = output.detail, output.id
        if self.pages is not None and not seq.output_ids and seq.hashes and output is not None:
            self.pages.publish(seq.pages, seq.hashes)
        if output is None:
            if not seq.pending:  # it would have nothing to compute and never end
                seq.error = RuntimeError("the model gave no token where one was due")
                seq.finish_reason = "abort"
            return
        if seq.max_tokens == 0:  # the prompt was to be scored, no more
            seq.finish_reason, seq.state = "length", "held"
            return
        seq.output_ids.append(output)
        if detail is not None:
            seq.details.append(detail)
        seq.last_token_at = now
        if seq.first_token_at is None:
            seq.first_token_at = now
        try:
            seq.finish_reason = seq.stop(output) if seq.stop else None
        except Exception as error:  # the request's own fault must not touch its neighbours
            seq.error, seq.finish_reason = error, "abort"
            return
        if seq.finish_reason is None and len(seq.output_ids) >= seq.max_tokens:
            seq.finish_reason = "length"
        if seq.finish_reason is not None:
            seq.state = "held"
        self.policy.on_token(seq, now)

    def _leave(self, seq: Sequence, now: float) -> None:
        self.running.remove(seq)
        heapq.heappush(self._free_slots, seq.slot)
        if self.pages is not None and seq.pages:
            self.pages.release(seq.pages)
            seq.pages = []
        self._finish(seq, now)

    def _finish(self, seq: Sequence, now: float) -> None:
        seq.state = "finished"
        seq.finished_at = now
        self.policy.on_finish(seq, now)

    def remove(self, seq: Sequence, now: float, reason: str = "abort") -> list[Sequence]:
        """Take a waiting or running sequence out at once, between two steps; return who left, first itself.

        Nobody leaves if it is done already. Whom the policy held for its sake alone leaves with it: no step would
        come to let them go but one that computes nothing, and fails if the model does.
        """
        if seq.state == "finished":
            return []
        seq.finish_reason = reason
        if seq in self.waiting:
            del self.waiting[seq]
            self._wait_clock.tick(now, self.number)
            self._wait_clock.leave(seq, now)
            self._finish(seq, now)
            return [seq]
        self._leave(seq, now)
        released = self.policy.release(self.running)
        for other in released:
            self._leave(other, now)
        return [seq, *released]

    def _slot_steps(self, plan: Plan) -> SlotSteps:
        rows = len(plan.sequences)
        padding = plan.padding / max(plan.counts) if plan.padding else 0.0
        held = len(plan.held)
        idle = self.policy.max_batch_size - rows - held
        return SlotSteps(useful=rows - padding, padding=padding, held=held, idle=idle)

"""The loop that every policy shares: plan an iteration, have it computed, take in what came out.

The server drives it with a model and `time.perf_counter`, the simulator with a cost and a virtual clock. It must
not know threads, HTTP, tensors, or which of the two it is in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from scheduling.iteration import Iteration, Member, Plan, SlotSteps
from scheduling.pages import PagePool
from scheduling.policy import Budget, Policy
from scheduling.sequence import Sequence
from scheduling.waiting import WaitClock

ENDLESS = 1 << 60
HOOKS = ("refuse", "preempt", "blocked_by", "release", "on_token", "on_step", "allocate_tokens")


class Token(NamedTuple):
    """A token with what else is known of it; `prompt_details` belong to prompt tokens of the same step."""

    id: int | None
    detail: Any = None
    prompt_details: list[Any] | None = None


Output = int | Token | BaseException | None  # a token, the row's own failure, or nothing due
Forward = Callable[[Plan], list[Output]]


class PolicyError(Exception):
    """A policy answered what cannot be done; the words name the hook."""


class Scheduler:
    """Sequences wait, run and leave; the policy decides, this keeps the books.

    `max_tokens_per_step` bounds the tokens of one step for policies that are not padded; prompts are cut to it.
    With `record=False` the records of steps have no members, which a simulation of millions of steps can do without.
    `slot_cap` bounds who may join below the policy's slots, where memory turned out to hold fewer.
    """

    def __init__(
        self, policy: Policy, pages: PagePool | None = None, max_tokens_per_step: int = 2048, *, record: bool = True
    ) -> None:
        self.pages = pages
        self.record = record
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: list[Sequence] = []
        self.number = 0
        self.slot_cap = ENDLESS
        self._asked_tokens_per_step = max_tokens_per_step
        self._recomputes = False  # somebody was preempted once
        self._wait_clock = WaitClock()
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        """Make `policy` the one that decides; find out once which of its hooks say anything."""
        own = {hook for hook in HOOKS if getattr(type(policy), hook) is not getattr(Policy, hook)}
        self.policy = policy
        self.max_tokens_per_step = max(self._asked_tokens_per_step, policy.max_batch_size)
        if self.pages is not None:
            policy.cached_tokens = self._cached_tokens
        taken = {seq.slot for seq in self.running}
        self._free_slots = [i for i in range(policy.max_batch_size) if i not in taken]
        self._refuses = "refuse" in own
        self._preempts = "preempt" in own and policy.preempts
        self._hinders, self._releases = "blocked_by" in own, "release" in own
        self._on_token = policy.on_token if "on_token" in own else None
        self._on_step = policy.on_step if "on_step" in own else None
        self._repeats = policy.padded or "allocate_tokens" not in own  # then decodes alone are shared alike
        self._repeat: tuple[list[Sequence], list[int], list[Sequence]] | None = None

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def waited(self, seq: Sequence, now: float) -> dict[str, tuple[int, float]]:
        """Return by reason for how many iterations and seconds a sequence has waited, up to now if it still does."""
        return self._wait_clock.so_far(seq, now)

    @property
    def token_budget(self) -> int:
        """Tokens that one step may compute, the policy's own bound among the reasons."""
        return min(self.max_tokens_per_step, self.policy.max_batched_tokens)

    def add(self, seq: Sequence) -> bool:
        """Let a sequence wait; its `arrived_at` must be set, and `pages.can_ever_hold` it.

        False when the policy refuses it: it has left then, with the reason "refused".
        """
        if self.pages is not None and not seq.hashes:
            seq.hashes = self.pages.hashes(seq.prompt_ids)
        if self.policy.draining:
            self.policy.draining = False
        if self._refuses and self.policy.refuse(seq, seq.arrived_at):
            seq.state, seq.finish_reason, seq.finished_at = "finished", "refused", seq.arrived_at
            return False
        self.waiting[seq] = None
        self._wait_clock.arrive(seq, seq.arrived_at)
        self.policy.on_arrival(seq, seq.arrived_at)
        return True

    def drain(self) -> None:
        """Say that nobody will arrive any more, so that no policy waits for company; `add` takes it back."""
        self.policy.draining = True

    def switch(self, policy: Policy, now: float) -> list[Sequence]:
        """Let `policy` decide from now on; return who left by that: held ones that it does not hold.

        Nobody is lost: who runs goes on and finishes, beyond the slots of the new policy if it has fewer, and those
        who wait arrive anew at it, in their order.
        """
        self._wait_clock.tick(now, self.number)
        policy.draining = self.policy.draining
        self._use(policy)
        for seq in self.running:
            policy.on_admit(seq, now)
        for seq in self.waiting:
            policy.on_arrival(seq, seq.arrived_at)
        return self._let_go([s for s in policy.release(self.running) if s.is_finished], now)

    def step(self, forward: Forward, clock: Callable[[], float]) -> Iteration | None:
        """Run one iteration; None when the policy lets everybody wait."""
        plan = self.plan(clock())
        if plan is None:
            return None
        return self.commit(plan, forward(plan), clock())

    def plan(self, now: float) -> Plan | None:
        """Admit who may join and return what the next step computes, None if nothing."""
        self._wait_clock.tick(now, self.number)
        preempted = self._preempt_by_policy(now) if self._preempts and self.running else []
        joined = self._admit(now) if self.waiting else []
        if not self.running:
            return None
        paused: list[Sequence] = []
        if self._repeat is None:
            sequences, counts, held, paused = self._allocate()
        else:
            sequences, counts, held = self._repeat
        self.number += 1
        padded = self.policy.padded
        return Plan(self.number, now, sequences, counts, held, padded, joined, paused, preempted)

    def _allocate(self) -> tuple[list[Sequence], list[int], list[Sequence], list[Sequence]]:
        """Return who computes how many tokens, who is held and who computes nothing."""
        live = [seq for seq in self.running if seq.finish_reason is None]
        held = [s for s in self.running if s.finish_reason is not None] if len(live) < len(self.running) else []
        if self.policy.padded:
            return live, [seq.pending for seq in live], held, []
        counts = self.policy.allocate_tokens(live, self.token_budget)
        if len(counts) != len(live):
            raise PolicyError(f"allocate_tokens: {len(counts)} numbers for {len(live)} running sequences")
        for seq, count in zip(live, counts):
            if not 0 <= count <= seq.pending:
                raise PolicyError(f"allocate_tokens: {count} tokens for {seq.id}, which has {seq.pending} left")
        if all(counts):
            return live, counts, held, []
        paused = [seq for seq, count in zip(live, counts) if not count]
        live = [seq for seq, count in zip(live, counts) if count]
        if not live and not held:
            raise PolicyError("allocate_tokens: no running request computes a token")
        return live, [count for count in counts if count], held, paused

    def wake_at(self, now: float) -> float | None:
        """Return when to plan again though nothing arrives; None to sleep until something does."""
        return self.policy.deadline(self.waiting, now) if self.waiting and not self.running else None

    @property
    def _open_slots(self) -> int:
        """How many may join now."""
        return max(0, min(len(self._free_slots), self.slot_cap - len(self.running)))

    def _budget(self) -> Budget:
        if self.pages is None:
            return Budget(self._open_slots, ENDLESS, self.token_budget)
        size = self.pages.page_size
        return Budget(self._open_slots, self.pages.free * size, self.token_budget, size)

    def _preempt_by_policy(self, now: float) -> list[Sequence]:
        """Take those off their slots whom the policy names; they wait again, before all others."""
        out = self.policy.preempt(self.waiting, self.running, self._budget(), now)
        if out:
            self._requeue(out, now)
        return out

    def preempt(self, plan: Plan, out: list[Sequence], now: float) -> Plan:
        """Let members of a plan that could not be computed wait again, before all others; return it without them.

        They keep their tokens, and compute all of them anew when they join again.
        """
        self._requeue(out, now)
        gone = set(out)
        rows = [(s, n) for s, n in zip(plan.sequences, plan.counts) if s not in gone]
        had_joined = set(plan.joined)
        return replace(
            plan,
            sequences=[seq for seq, _ in rows],
            counts=[count for _, count in rows],
            joined=[seq for seq in plan.joined if seq not in gone],
            preempted=plan.preempted + [seq for seq in out if seq not in had_joined],
        )

    def _requeue(self, out: list[Sequence], now: float) -> None:
        """Take these off their slots, and put them before all who wait, the first to come first."""
        self._take_off(out)
        self._recomputes = True
        for seq in sorted(out, key=lambda seq: seq.arrived_at, reverse=True):
            seq.recompute_until = max(seq.recompute_until, seq.computed)
            seq.computed = seq.cached = 0
            seq.preemptions += 1
            seq.state = "waiting"
            if not seq.output_ids:
                seq.prompt_details.clear()
            self.waiting[seq] = None
            self.waiting.move_to_end(seq, last=False)
            self._wait_clock.arrive(seq, now)
        for seq in out:
            self.policy.on_preempt(seq, now)

    def _admit(self, now: float) -> list[Sequence]:
        joined: list[Sequence] = []
        if not self._open_slots:
            self._wait_clock.reason = "slots_full"
            return joined
        policy, running, budget = self.policy, self.running, self._budget()
        n = min(policy.admit(self.waiting, running, budget, now), budget.slots)
        reason = None
        for seq in policy.order(self.waiting, now) if n > 0 else ():
            if seq.state != "waiting":
                raise PolicyError(f"order: {seq.id} is {seq.state}, not waiting")
            if self._hinders:
                reason = policy.blocked_by(seq, running, budget)
            if reason is None and not self._reserve(seq):
                reason = "kv_full"
            if reason is not None:
                break
            self._join(seq, now)
            joined.append(seq)
            if len(joined) == n:
                break
            if self._hinders:
                budget = self._budget()
        for seq in joined:
            del self.waiting[seq]
        if self.waiting:
            self._wait_clock.reason = reason or self._why_waiting(now)
        return joined

    def _why_waiting(self, now: float) -> str:
        if not self._open_slots:
            return "slots_full"
        return "window" if self.wake_at(now) is not None else "policy_order"

    def _cached_tokens(self, seq: Sequence) -> int:
        return self.pages.cached_tokens(seq.hashes) if self.pages is not None else 0

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
        self._wait_clock.leave(seq, now)
        seq.slot = heapq.heappop(self._free_slots)
        seq.state = "running"
        if seq.scheduled_at is None:
            seq.scheduled_at = now
            seq.first_iteration = self.number + 1
        self.running.append(seq)
        self._repeat = None
        self.policy.on_admit(seq, now)

    def commit(self, plan: Plan, outputs: list[Output], now: float) -> Iteration:
        """Take in the outputs of a step that was computed; return its record.

        A step is a transaction: until this call no sequence has moved, so a failed one can be tried again.
        """
        slot_steps = self._slot_steps(plan)
        phases = ["prefill" if s.is_prefilling else "decode" for s in plan.sequences if self.record]
        failed, finished = self._advance_all(plan, outputs, now)
        members = self._members(plan, phases) if self.record else []
        if self._on_step is not None:
            self._on_step(plan, now)
        pages = self.pages
        used, total = (pages.used, pages.total) if pages is not None else (0, 0)
        answered = self._let_go(failed, now) if failed else []
        if finished and self.policy.early:
            answered += self._answer(finished, now)
        if finished or self._releases:
            answered += self._let_go(self.policy.release(self.running), now)
        return Iteration(
            plan.number, plan.started_at, now - plan.started_at, self.policy.name, len(self.waiting), members,
            [seq.id for seq in plan.joined], [(s.id, s.finish_reason or "abort") for s in answered],
            slot_steps, used, total, [seq.id for seq in plan.preempted],
        )  # fmt: skip

    def _members(self, plan: Plan, phases: list[str]) -> list[Member]:
        rows = [
            Member(seq.id, seq.slot, phase, count, seq.computed, seq.total)
            for seq, count, phase in zip(plan.sequences, plan.counts, phases)
        ]
        for phase, others in (("held", plan.held), ("idle", plan.paused)):
            rows += [Member(s.id, s.slot, phase, 0, s.computed, s.total) for s in others]
        return rows

    def _advance_all(self, plan: Plan, outputs: list[Output], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Move every member of a step on; return whose row failed and who has all its tokens now.

        A plain decode is most of what ever happens, so it has its own few lines here. When all were, and nobody is
        done, the next step is the same.
        """
        failed: list[Sequence] = []
        finished: list[Sequence] = []
        batch, number = len(plan.sequences) + len(plan.held), plan.number
        alike = self._repeats and not plan.paused
        on_token = self._on_token
        for seq, count, output in zip(plan.sequences, plan.counts, outputs):
            ids = seq.output_ids
            if count == 1 and ids and type(output) is int and seq.stop is None:
                ids.append(output)
                seq.computed += 1
                seq.last_token_at = now
                if len(ids) >= seq.max_tokens:
                    seq.finish_reason, seq.state = "length", "held"
                    finished.append(seq)
                if on_token is not None:
                    on_token(seq, now)
            else:
                alike = alike and count == 1
                self._advance(seq, count, output, now)
                if seq.error is not None:
                    failed.append(seq)
                elif seq.finish_reason is not None:
                    finished.append(seq)
                elif seq.pending > 1:
                    alike = False
            seq.last_iteration = number
            seq.batch_sum += batch
            if batch > seq.batch_max:
                seq.batch_max = batch
        alike = alike and not failed and not finished
        self._repeat = (plan.sequences, plan.counts, plan.held) if alike else None
        return failed, finished

    def _advance(self, seq: Sequence, count: int, output: Output, now: float) -> None:
        seq.computed += count
        if isinstance(output, BaseException):
            seq.error, seq.finish_reason = output, "abort"
            return
        detail = None
        if isinstance(output, Token):
            if output.prompt_details and not seq.output_ids:
                seq.prompt_details += output.prompt_details
            detail, output = output.detail, output.id
        if output is None:
            if not seq.pending:  # it would have nothing to compute and never end
                seq.error = RuntimeError("the model returned no token where one was expected")
                seq.finish_reason = "abort"
            return
        if self.pages is not None and seq.hashes and (count > 1 or not seq.output_ids):
            self.pages.publish(seq.pages, seq.hashes)
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
        if self._on_token is not None:
            self._on_token(seq, now)

    def _let_go(self, leaving: list[Sequence], now: float) -> list[Sequence]:
        """Take these off their slots; return those of them who had no answer yet, and have it now."""
        for seq in leaving:
            if seq.finish_reason is None:
                raise PolicyError(f"release: {seq.id} does not have all its tokens yet")
        leaving = list(leaving)
        self._take_off(leaving)
        return self._answer(leaving, now)

    def _take_off(self, leaving: list[Sequence]) -> None:
        """Free the slots and pages of these; PolicyError when one is named twice, or does not run."""
        if not leaving:
            return
        gone = set(leaving)
        kept = [seq for seq in self.running if seq not in gone]
        if len(gone) < len(leaving) or len(kept) + len(gone) != len(self.running):
            named = ", ".join(seq.id for seq in leaving)
            raise PolicyError(f"release or preempt: {named}: one of them twice, or not running")
        self.running[:] = kept
        self._repeat = None
        for seq in leaving:
            if seq.slot < self.policy.max_batch_size:
                heapq.heappush(self._free_slots, seq.slot)
            if self.pages is not None and seq.pages:
                self.pages.release(seq.pages)
                seq.pages = []

    def _answer(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Finish those who are not finished; return them."""
        fresh = [seq for seq in sequences if seq.state != "finished"]
        for seq in fresh:
            seq.state = "finished"
            seq.finished_at = now
            if seq.finish_reason == "abort":
                self.policy.on_cancel(seq, now)
            else:
                self.policy.on_finish(seq, now)
        return fresh

    def remove(self, seq: Sequence, now: float, reason: str = "abort") -> list[Sequence]:
        """Take a waiting or running sequence out at once, between two steps; return who left, first itself."""
        return self.remove_all([seq], now, reason)

    def remove_all(self, sequences: list[Sequence], now: float, reason: str = "abort") -> list[Sequence]:
        """Take different sequences out in one pass, between two steps; return who left, these first.

        Those that are done already do not leave. Whom the policy held for the sake of these alone leaves with them: no
        step would come to let them go but one that computes nothing, and fails if the model does.
        """
        leaving = [seq for seq in sequences if seq.state != "finished"]
        if not leaving:
            return []
        waiting = [seq for seq in leaving if seq.state == "waiting"]
        if waiting:
            self._wait_clock.tick(now, self.number)
        for seq in waiting:
            del self.waiting[seq]
            self._wait_clock.leave(seq, now)
        self._take_off([seq for seq in leaving if seq.state != "waiting"])
        for seq in leaving:
            seq.finish_reason, seq.state, seq.finished_at = reason, "finished", now
            self.policy.on_cancel(seq, now)
        return leaving + self._let_go(self.policy.release(self.running), now)

    def identical_steps_ahead(self, plan: Plan) -> int:
        """Return how many steps like this plan, itself the first, are sure to follow each other unless somebody arrives.

        All members decode, nobody leaves before the last of them, and nobody who waits could join: a simulator may
        go through them without asking. `admission_closed` says whether arrivals may be ignored on the way, too.
        """
        quiet = self._repeats and self._on_step is None and not self._preempts
        if not quiet or plan.joined or plan.paused or (self.waiting and not self.admission_closed):
            return 1
        if any(s.pending > 1 or not s.output_ids or s.stop is not None for s in plan.sequences):
            return 1
        return min((s.max_tokens - len(s.output_ids) for s in plan.sequences), default=1)

    @property
    def admission_closed(self) -> bool:
        """Whether nobody who waits or arrives can join before somebody leaves."""
        shut = not self._open_slots or (self.policy.closed and bool(self.running))
        return shut and not self._preempts

    def _slot_steps(self, plan: Plan) -> SlotSteps:
        rows, held = len(plan.sequences), len(plan.held)
        longest = max(plan.counts) if plan.padded and plan.counts else 0  # the width of each padded row
        padding = plan.padding / longest if longest else 0.0
        recomputed = 0.0
        if self._recomputes:
            for seq, count in zip(plan.sequences, plan.counts):
                if seq.recompute_until > seq.computed:
                    recomputed += min(count, seq.recompute_until - seq.computed) / (longest or count)
        idle = max(0, self.policy.max_batch_size - rows - held)
        return SlotSteps(rows - padding - recomputed, padding, held, idle, recomputed)

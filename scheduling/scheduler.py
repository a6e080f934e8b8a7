"""The loop that every policy shares: plan a step, have it computed, commit what came out.

The server drives it with a model and `time.perf_counter`, the simulator with a cost and a virtual clock. It must not
know threads, HTTP, tensors, or which of the two it is in.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduling.admission import Admission
from scheduling.advance import Errors, Output, Run, Token, advance, keep
from scheduling.allocation import allocate
from scheduling.backlog import Backlog
from scheduling.batch import Batch
from scheduling.hooks import Hooks
from scheduling.iteration import Iteration, Plan, SlotSteps, members_of
from scheduling.pages import PagePool
from scheduling.policy import Policy, PolicyError
from scheduling.reservations import ENDLESS
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator

__all__ = ["ENDLESS", "Forward", "Output", "PolicyError", "Run", "Scheduler", "Token"]

Forward = Callable[[Plan], list[Output]]


class Scheduler:
    """Sequences wait, run and leave. The policy decides, the scheduler keeps the books.

    `max_tokens_per_step` bounds the tokens of one step for policies that are not padded; prompts are cut to it.
    With `record=False` the records of steps have no members, which saves time in a simulation of millions of steps. A
    `speculator` lets decoding sequences get several tokens in a step.

    If a hook raises an error, each sequence still waits, runs, or has left, so that another policy can go on (`switch`).
    Errors of hooks that only take note, and of `release`, are kept in `errors` if that is a list, and then the step goes
    on; all others are raised.
    """

    def __init__(
        self,
        policy: Policy,
        pages: PagePool | None = None,
        max_tokens_per_step: int = 2048,
        *,
        record: bool = True,
        speculator: Speculator | None = None,
    ) -> None:
        self.pages = pages
        self.record = record
        self.speculator = speculator
        self.number = 0
        self.batch = Batch(pages)
        self.queue = Admission(self.batch)
        self.backlog = Backlog()
        self.running, self.waiting, self.wait_clock = self.batch.running, self.queue.waiting, self.queue.clock
        self.refused: list[Sequence] = []  # those that the last `plan` turned away, after they had waited
        self.errors: Errors = None
        self._least_tokens_per_step = max_tokens_per_step
        self._preempted: list[Sequence] = []  # since the last plan
        self._repeat: Plan | None = None  # the last plan, if the next one equals it
        self._use(policy)

    def _use(self, policy: Policy) -> None:
        """Make `policy` the active one."""
        self.policy, self.hooks = policy, Hooks.of(policy)
        self.max_tokens_per_step = max(self._least_tokens_per_step, policy.max_batch_size)
        if self.pages is not None:
            policy.cached_tokens, policy.page_size = self.batch.pages.cached_tokens, self.batch.pages.page_size
        self.batch.resize(policy.max_batch_size)
        self._repeat = None

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def waited(self, seq: Sequence, now: float) -> dict[str, tuple[int, float]]:
        """Return by reason for how many iterations and seconds a sequence has waited, until now if it still does."""
        return self.wait_clock.so_far(seq, now)

    @property
    def token_budget(self) -> int:
        """The tokens that one step may compute, at most what the policy allows."""
        return min(self.max_tokens_per_step, self.policy.max_batched_tokens)

    @property
    def slot_cap(self) -> int:
        """The limit on running sequences below the policy's slots, set after memory ran out with more."""
        return self.batch.slot_cap

    @slot_cap.setter
    def slot_cap(self, cap: int) -> None:
        self.batch.slot_cap = cap

    def add(self, seq: Sequence) -> bool:
        """Queue a sequence, whose `arrived_at` is set and which the pages can ever hold.

        Return False if the policy refuses it: it has left then, with the reason "refused".
        """
        self.batch.pages.hash(seq)
        if self.policy.draining:
            self.policy.draining = False
        if self.policy.estimates and self.speculator is None:
            slots = self.batch.free_slots + len(self.running)
            seq.estimate = self.backlog.estimate(seq, self.waiting, self.running, slots, self._to_compute)
        if self.hooks.refuses and self.policy.refuse(seq, seq.arrived_at):
            seq.state, seq.finish_reason, seq.finished_at = "finished", "refused", seq.arrived_at
            return False
        self.queue.arrive(seq)
        self._arrive(seq)
        return True

    def _to_compute(self, seq: Sequence) -> int:
        return seq.pending - self.policy.cached_tokens(seq)

    def share_queue(self, other: Scheduler) -> None:
        """Serve the queue of another scheduler, with its policy, from now on; both are idle."""
        self.queue.share(other.queue)
        self.waiting, self.wait_clock = self.queue.waiting, self.queue.clock
        self._use(other.policy)

    def _arrive(self, seq: Sequence) -> None:
        """Let a waiting sequence arrive at the policy."""
        self.policy.on_arrival(seq, seq.arrived_at)
        if self.hooks.expires:
            self.queue.expire_at(seq, self.policy.expires_at(seq))

    def drain(self) -> None:
        """Announce to the policy that no more requests will arrive, so that none waits for others; `add` revokes it."""
        self.policy.draining = True

    def switch(self, policy: Policy, now: float) -> list[Sequence]:
        """Let `policy` decide from now on; return the sequences that leave because only the old policy held them.

        Running sequences finish, beyond the slots of the new policy if it has fewer, and waiting ones arrive at it in
        their order. Nothing changes if the new policy raises an error.
        """
        self.wait_clock.tick(now, self.number)
        before, expiries = self.policy, self.queue.expiries.copy()
        policy.draining = before.draining
        try:
            self._use(policy)
            for seq in self.running:
                policy.on_admit(seq, now)
            self.queue.expiries.clear()
            for seq in self.waiting:
                self._arrive(seq)
            return self._release([s for s in policy.release(self.running) if s.is_finished], now)
        except Exception:
            self._use(before)
            self.queue.expiries[:] = expiries
            raise

    def step(self, forward: Forward, clock: Callable[[], float]) -> Iteration | None:
        """Run one iteration; return None if the policy lets all requests wait."""
        plan = self.plan(clock())
        if plan is None:
            return None
        return self.commit(plan, forward(plan), clock())

    def plan(self, now: float) -> Plan | None:
        """Let sequences join, and return what the next step computes, None if nothing."""
        self.wait_clock.tick(now, self.number)
        self.refused = self.queue.expire(now)
        for seq in self.refused:
            self._notify(self.policy.on_cancel, seq, now)
        if self.running:
            self._preempt(now)
        number = self.number + 1
        if self.waiting:
            self.queue.admit(self.policy, self.hooks, self.token_budget, number, now)
        if not self.running:
            self._preempted = []
            return None
        joined, preempted = self.queue.joined, self._preempted
        if joined:
            self._repeat = None
        if self._repeat is not None:
            # Legal until a sequence joins or leaves: each member has one token pending, and gets it (Hooks.repeats).
            last = self._repeat
            plan = Plan(number, now, last.sequences, last.counts, last.held, last.padded, repeats=True)
        else:
            sequences, counts, held, paused = allocate(self.policy, self.running, self.token_budget)
            plan = Plan(number, now, sequences, counts, held, self.policy.padded, joined, paused, preempted)
        plan.blocked_by = self.wait_clock.reason if self.waiting else None
        if self.speculator is not None and plan.sequences:
            self.speculator.add_drafts(plan, self.policy, self.batch.pages, self.token_budget)
        # Not before here: if a hook fails, the next plan has this number, and those that joined and were preempted.
        self.number = number
        if joined or preempted:
            self.queue.joined, self._preempted = [], []
        return plan

    def wake_at(self, now: float) -> float | None:
        """Return when to plan again although nothing arrives; None to sleep until something does."""
        return self.queue.wake_at(self.policy, now)

    def preempt(self, plan: Plan, sequences: list[Sequence], now: float) -> None:
        """Take members out of a plan that could not be computed.

        They wait again, before all others, and their tokens are recomputed when they join again.
        """
        self._vacate(sequences)
        self._requeue(sequences, now)
        plan.remove(sequences)

    def _preempt(self, now: float) -> None:
        """Let the policy preempt requests, and those that grow take the pages of others if none is free."""
        preempted: list[Sequence] = []
        try:
            if self.hooks.preempts:
                chosen = self.policy.preempt(self.waiting, self.running, self.batch.budget(self.token_budget), now)
                if chosen:
                    self.batch.vacate(chosen)
                preempted += chosen
            self.batch.grow(self.policy.victim, now, preempted)
        finally:  # whatever a hook raises, those that have lost their slots wait
            if preempted:
                self._forget(preempted)
                self._requeue(preempted, now)
                self._preempted += preempted

    def _requeue(self, sequences: list[Sequence], now: float) -> None:
        """Let sequences that were preempted wait again."""
        self.queue.requeue(sequences, now)
        for seq in sequences:
            self._notify(self.policy.on_preempt, seq, now)

    def _notify(self, hook: Callable[[Sequence, float], None], seq: Sequence, now: float) -> None:
        """Call a hook that only takes note."""
        try:
            hook(seq, now)
        except Exception as error:
            keep(error, self.errors)

    def commit(self, plan: Plan, outputs: list[Output], now: float) -> Iteration:
        """Take in the outputs of a step that was computed; return its record.

        A step is a transaction: no sequence changes before this call, so that a failed step can be retried. It is also
        why a runner may launch the next step before the outputs of this one are read: nothing that it launched counts
        until it is committed.
        """
        self.backlog.forget()
        slot_steps = SlotSteps.of(plan, self.policy.slots)
        phases = ["prefill" if s.is_prefilling else "decode" for s in plan.sequences] if self.record else []
        failed, finished, steady, drafts, rejected = advance(
            plan, outputs, now, self.hooks.on_token, self.batch.pages.publish, self.errors
        )
        if self.policy.estimates:
            self.backlog.learn(plan, now)
        self._repeat = plan if steady and self.hooks.repeats else None
        if self.speculator is not None:
            self.speculator.learn(plan, drafts, now - plan.started_at)
            self.batch.pages.settle()
        if plan.drafts:
            slot_steps = slot_steps._replace(useful=slot_steps.useful - rejected, rejected=rejected)
        members = members_of(plan, phases) if self.record else []
        if self.hooks.on_step is not None:
            try:
                self.hooks.on_step(plan, now)
            except Exception as error:
                keep(error, self.errors)
        answered = self._release(failed, now) if failed else []
        if finished and self.policy.early:
            answered += self._answer(finished, now)
        # Without a `release` of its own, a policy lets go of finished sequences only, so a step that finishes none
        # needs no call.
        if finished or self.hooks.releases:
            answered += self._let_go(now)
        return Iteration(
            plan.number, plan.started_at, now - plan.started_at, self.policy.name, len(self.waiting), members,
            [seq.id for seq in plan.joined], [(s.id, s.finish_reason or "abort") for s in answered],
            slot_steps, *self.batch.pages.usage, [seq.id for seq in plan.preempted], plan.repeats, plan.blocked_by,
            drafts,
        )  # fmt: skip

    def _let_go(self, now: float) -> list[Sequence]:
        """Release what the policy lets go; if it fails, the next `switch` does."""
        try:
            return self._release(self.policy.release(self.running), now)
        except Exception as error:
            keep(error, self.errors)
            return []

    def _release(self, leaving: list[Sequence], now: float) -> list[Sequence]:
        """Free the slots of finished sequences; return those that are answered by it."""
        for seq in leaving:
            if seq.finish_reason is None:
                raise PolicyError(f"release: {seq.id} does not have all its tokens yet")
        leaving = list(leaving)
        self._vacate(leaving)
        return self._answer(leaving, now)

    def _vacate(self, leaving: list[Sequence]) -> None:
        if leaving:
            self.batch.vacate(leaving)
            self._forget(leaving)

    def _forget(self, leaving: list[Sequence]) -> None:
        """Forget what was known of a batch that these have left."""
        self.backlog.forget()
        self._repeat = None
        if self.speculator is not None:
            self.speculator.forget(leaving)

    def _answer(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Finish the sequences that are not answered yet; return them."""
        fresh = [seq for seq in sequences if seq.state != "finished"]
        for seq in fresh:
            seq.state = "finished"
            seq.finished_at = now
            self._notify(self.policy.on_cancel if seq.finish_reason == "abort" else self.policy.on_finish, seq, now)
        return fresh

    def suspend(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Take sequences out between two steps that are to go on later: `add` queues them again, with their tokens.

        Return those that the policy held only for these, which leave with them.
        """
        waiting = [seq for seq in sequences if seq.state == "waiting"]
        running = [seq for seq in sequences if seq.state != "waiting"]
        self.wait_clock.tick(now, self.number)
        self.queue.withdraw(waiting, now)
        self._vacate(running)
        for seq in running:
            seq.preempt()
        for seq in sequences:
            self._notify(self.policy.on_cancel, seq, now)
        return self._let_go(now)

    def remove_all(self, sequences: list[Sequence], now: float, reason: str = "abort") -> list[Sequence]:
        """Take sequences out in one pass, between two steps; return the sequences that leave, these first.

        Finished sequences do not leave again. Sequences that the policy held only for these leave with them, since
        the step that would let them go would compute nothing.
        """
        leaving = [seq for seq in sequences if seq.state != "finished"]
        if not leaving:
            return []
        waiting = [seq for seq in leaving if seq.state == "waiting"]
        if waiting:
            self.wait_clock.tick(now, self.number)
        self.queue.withdraw(waiting, now)
        self._vacate([seq for seq in leaving if seq.state != "waiting"])
        for seq in leaving:
            seq.finish_reason, seq.state, seq.finished_at = reason, "finished", now
            self._notify(self.policy.on_cancel, seq, now)
        return leaving + self._let_go(now)

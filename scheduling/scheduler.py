"""The loop that every policy shares: plan a step, have it computed, commit its outputs.

The server drives it with a model and `time.perf_counter`, the simulator with a cost and a virtual clock. It must not
know threads, HTTP, tensors, or which of the two it is in. What a step does, and the files that do it:

    plan
      time that has passed is charged to those that wait, by reason             waiting.py
      those that waited too long are refused                                    wait_queue.py
      the policy preempts; those that grow get pages, if need be a victim's     batch.py, reservations.py
      the policy lets waiting ones join, each with a slot and pages             wait_queue.py, batch.py, pages.py
      the policy divides the tokens of the step among the running ones          batch.py
      decodes get as many drafts as pay                                         speculation.py, draft_choice.py
    compute, by the caller: an output for each sequence                         driver.py, serving/loop.py
    commit
      outputs become tokens; pages of computed prompts can be found             advance.py, pages.py
      the time of the step is learned, and which drafts were right              backlog.py, speculation.py, step_law.py
      pages of wrong drafts are given back                                      reservations.py
      those that are done leave when the policy releases them                   batch.py
      the step becomes a record for events, traces and metrics                  iteration.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scheduling.advance import Advanced, Output, Token, TokenRun, advance
from scheduling.backlog import Backlog
from scheduling.batch import RunningBatch
from scheduling.hooks import Hooks
from scheduling.iteration import Iteration, Members, Plan, SlotSteps, reasons
from scheduling.pages import PagePool
from scheduling.policy import Policy, PolicyError
from scheduling.sequence import Sequence
from scheduling.sharing import Sharing
from scheduling.speculation import Speculator
from scheduling.wait_queue import WaitQueue

__all__ = ["Output", "PolicyError", "Scheduler", "Token", "TokenRun"]


class Scheduler:
    """Sequences wait, run and leave. The policy decides, the scheduler keeps the books.

    `max_tokens_per_step` bounds the tokens of one step for policies that are not padded; prompts are cut to it.
    With `record=False` the records of steps have no members, which saves time in a simulation of millions of steps. A
    `speculator` lets decoding sequences get several tokens in a step. `slots` numbers its slots where others share its queue.

    If a hook raises an error, each sequence still waits, runs, or has left, so that another policy can go on (`switch`).
    Errors of hooks that only take note, and of `release`, are kept in `sharing.errors` unless `sharing.raises`, and then the step
    goes on; all others are raised.
    """

    def __init__(
        self, policy: Policy, pages: PagePool | None = None, max_tokens_per_step: int = 2048, *,
        record: bool = True, speculator: Speculator | None = None, slots: range | None = None,
    ) -> None:  # fmt: skip
        self.pages, self.record, self.speculator = pages, record, speculator
        self.number = 0
        self.batch = RunningBatch(pages, slots)
        self.rows = None if slots is None else (slots.start, slots.stop)
        self.sharing = Sharing(self)  # all schedulers on this queue
        self.queue = WaitQueue(self.batch)
        self.backlog = Backlog(self.batch)
        self.running, self.waiting, self.wait_clock = self.batch.running, self.queue.waiting, self.queue.clock
        self.refused: list[Sequence] = []  # those that the last `plan` turned away, after they had waited
        self._least_tokens_per_step = max_tokens_per_step
        self._preempted: list[Sequence] = []  # since the last plan
        self._repeat: Plan | None = None  # the last plan that was committed, if each member decodes one more token
        self._stale = 0  # the number of the last plan whose members may not be those that run now
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Make `policy` the active one."""
        self.policy, self.hooks = policy, Hooks(policy)
        self.max_tokens_per_step = max(self._least_tokens_per_step, policy.max_batch_size)
        if self.pages is not None:
            pages = self.batch.pages
            policy.cached_tokens, policy.room, policy.page_size = pages.cached_tokens, pages.room, pages.page_size
            policy.kv_total = pages.usage[1] * pages.page_size
            pages.unpin()
        self.batch.resize(policy.max_batch_size)
        self._slots = len(self.batch.numbers[: policy.slots])
        self._stale = self.number
        self.backlog.queues.clear()

    def share(self, first: Scheduler) -> None:
        """Serve the queue of another scheduler, with its policy, from now on; called while idle. Each plans its own steps."""
        self.queue.share(first.queue)
        self.waiting, self.wait_clock = self.queue.waiting, self.queue.clock
        self.backlog, self.sharing = first.backlog, first.sharing
        self.backlog.batches.append(self.batch)
        self.sharing.append(self)
        self.use(first.policy)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def token_budget(self) -> int:
        """The tokens that one step may compute, at most what the policy allows."""
        return min(self.max_tokens_per_step, self.policy.max_batched_tokens)

    def add(self, seq: Sequence) -> bool:
        """Queue a sequence, whose `arrived_at` is set and which the pages can ever hold.

        Return False if the policy refuses it: it has left then, with the reason "refused".
        """
        self.batch.pages.hash(seq)
        self.policy.draining = False
        if self.policy.estimates and self.speculator is None:
            seq.estimate = self.backlog.estimate(seq, self.waiting, self.policy)
        if self.hooks.refuses and self.policy.refuse(seq, seq.arrived_at):
            seq.state, seq.finish_reason, seq.finished_at = "finished", "refused", seq.arrived_at
            return False
        self.queue.arrive(seq)
        self.arrive(seq)
        return True

    def arrive(self, seq: Sequence) -> None:
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
        return self.sharing.switch(policy, now)

    def step(self, forward: Callable[[Plan], list[Output]], clock: Callable[[], float]) -> Iteration | None:
        """Run one iteration; return None if the policy lets all requests wait."""
        plan = self.plan(clock())
        return None if plan is None else self.commit(plan, forward(plan), clock())

    def plan(self, now: float) -> Plan | None:
        """Let sequences join, and return what the next step computes, None if nothing."""
        pages = self.batch.pages
        self.wait_clock.tick(now, self.number)
        if pages.pins:
            pages.unpin(now)
        self.refused = self.queue.expire(now) if self.queue.expiries else []
        for seq in self.refused:
            self._notify(self.policy.on_cancel, seq, now)
        if self.running:
            if self.hooks.preempts or pages.step + 1 in pages.due:
                self._preempt(now)
            else:
                pages.step += 1
        number = self.number + 1
        if self.waiting:
            self.queue.admit(self.policy, self.hooks, self.token_budget, number, now)
        if not self.running:
            self._preempted = []
            return None
        joined, preempted = self.queue.joined, self._preempted
        if joined:
            self._stale = self.number
        if (last := self._repeat) is not None and last.number > self._stale:
            # Legal until a sequence joins or leaves: each member has one token pending, and gets it (Hooks.repeats).
            rows = last.sequences, last.counts, last.held, last.padded
            plan = Plan(number, now, *rows, repeats=True, decoding=len(last.counts), like=last.like)
        else:
            plan = self.batch.plan(self.policy, self.token_budget, number, now)
        plan.blocked_by = self.wait_clock.reason if self.waiting else None
        if self.speculator is not None and plan.sequences and not (plan.repeats and self.speculator.rests):
            self.speculator.add_drafts(plan, self.policy, pages, self.token_budget)
        # Not before here: if a hook fails, the next plan has this number, and those that joined and were preempted.
        self.number = number
        if joined or preempted:
            plan.joined, plan.preempted = joined, preempted
            self.queue.joined, self._preempted = [], []
        return plan

    def plan_ahead(self, now: float) -> Plan | None:
        """Plan while other steps are computed: the last committed step need not be the last one planned."""
        self.batch.decoding = 0
        return self.plan(now)

    def is_current(self, plan: Plan) -> bool:
        """Return whether no sequence has joined, finished or left since a plan was made."""
        return plan.number > self._stale

    def wake_at(self, now: float) -> float | None:
        """Return when to plan again although nothing arrives; None to sleep until something does."""
        return self.queue.wake_at(self.policy, now)

    def preempt(self, plan: Plan, sequences: list[Sequence], now: float) -> None:
        """Take members out of a plan that could not be computed; they wait again, before all others."""
        self.batch.vacate(sequences)
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
                self._requeue(preempted, now)
                self._preempted += preempted

    def _requeue(self, sequences: list[Sequence], now: float) -> None:
        """Let sequences that have lost their slots wait again."""
        self._forget(sequences)
        self.queue.requeue(sequences, now)
        for seq in sequences:
            self._notify(self.policy.on_preempt, seq, now)

    def _notify(self, hook: Callable[[Any, float], None], subject: Sequence | Plan, now: float) -> None:
        """Call a hook that only takes note: what was computed counts, whatever the policy makes of it."""
        try:
            hook(subject, now)
        except BaseException as error:
            self.sharing.keep(error)

    def commit(self, plan: Plan, outputs: list[Output], now: float) -> Iteration:
        """Take in the outputs of a step that was computed; return its record."""
        like = plan.like if plan.repeats else None
        # Who computed a prompt, and how slots were spent, can only be told before sequences advance.
        slot_steps = SlotSteps.of(plan, self._slots, self.queue.recomputes) if like is None else like.slot_steps
        phases = plan.phases() if self.record and like is None else None
        result, answered = self.take_in(plan, outputs, now)
        if result.rejected:
            slot_steps = slot_steps._replace(useful=slot_steps.useful - result.rejected, rejected=result.rejected)
        members = Members.of_plan(plan, phases) if like is None else like.members.at(plan)
        pages_used, pages_total = self.batch.pages.usage
        iteration = Iteration(
            n=plan.number, t=plan.started_at, seconds=now - plan.started_at, policy=self.policy.name,
            queue=len(self.waiting), members=members, joined=[seq.id for seq in plan.joined],
            left=reasons(answered) if answered else [],
            slot_steps=slot_steps, pages_used=pages_used, pages_total=pages_total,
            preempted=[seq.id for seq in plan.preempted], repeats=plan.repeats, blocked_by=plan.blocked_by,
            drafts=result.drafts, mask_seconds=plan.mask_seconds, experts=plan.experts, rows=self.rows,
        )  # fmt: skip
        plan.like = iteration if plan.repeats else None
        return iteration

    def take_in(self, plan: Plan, outputs: list[Output], now: float) -> tuple[Advanced, list[Sequence]]:
        """Do what `commit` does without a record; return what the outputs did, and the sequences that are answered now.

        A step is a transaction: no sequence changes before this call, so a failed step can be retried, and a runner may
        launch the next step before the outputs of this one are read: nothing that it launched counts until it is committed.
        """
        if self.policy.estimates:
            self.backlog.queues.clear()
        self.batch.decoding = 0  # until all hooks have come through
        on_token = None if self.hooks.on_token is None else partial(self._notify, self.hooks.on_token)
        result = advance(plan, outputs, now, on_token, self.batch.pages.publish)
        return result, self.settle(plan, result, now)

    def settle(self, plan: Plan, result: Advanced, now: float) -> list[Sequence]:
        """Learn from a step whose sequences have advanced, and let go of those that are done; return the answered ones."""
        if self.policy.estimates:
            self.backlog.learn(plan, now)
        done = len(result.finished) + len(result.failed)
        is_steady = self.hooks.repeats and result.decoding and not done and plan.counts.count(1) == len(plan.counts)
        self._repeat = plan if is_steady else None
        if result.finished:
            self._stale = self.number
        if self.speculator is not None:
            self.speculator.learn(plan, result.drafts, now - plan.started_at)
        if self.batch.pages.lent:
            self.batch.pages.settle()
        if self.hooks.on_step is not None:
            self._notify(self.hooks.on_step, plan, now)
        answered = self.leave(result.failed, now) if result.failed else []
        if result.finished and self.policy.early:
            answered += self._answer(result.finished, now)
        # Without a `release` of its own, a policy lets go of finished sequences only, so a step that finishes none
        # needs no call.
        if result.finished or self.hooks.overrides_release:
            answered += self.let_go(now)
        # If all that run got a token, and those that are done have left, the others decode.
        left = len(plan.sequences) - done
        self.batch.decoding = left if result.decoding and len(self.running) == left else 0
        if self.batch.pages.window:
            self.batch.pages.release_unseen(plan.sequences)
        return answered

    def let_go(self, now: float) -> list[Sequence]:
        """Release what the policy lets go; if it fails, the next `switch` does."""
        try:
            return self.leave(self.policy.release(self.running), now)
        except BaseException as error:
            self.sharing.keep(error)
            return []

    def leave(self, leaving: list[Sequence], now: float) -> list[Sequence]:
        """Free the slots of finished sequences; return those that are answered by it."""
        for seq in leaving:
            if seq.finish_reason is None:
                raise PolicyError(f"release: {seq.id} does not have all its tokens yet")
        leaving = list(leaving)
        self.vacate(leaving)
        return self._answer(leaving, now)

    def vacate(self, leaving: list[Sequence]) -> None:
        if leaving:
            self.batch.vacate(leaving)
            self._forget(leaving)

    def _forget(self, leaving: list[Sequence]) -> None:
        """Forget what was known of a batch that these have left."""
        self.backlog.queues.clear()
        self._stale = self.number
        if self.speculator is not None:
            self.speculator.forget(leaving)

    def _answer(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Finish the sequences that are not answered yet; return them."""
        fresh = [seq for seq in sequences if seq.state != "finished"]
        for seq in fresh:
            seq.state = "finished"
            seq.finished_at = now
            self._notify(self.policy.on_cancel if seq.finish_reason == "abort" else self.policy.on_finish, seq, now)
            if self.hooks.keeps:
                self._notify(self._pin, seq, now)
        return fresh

    def _pin(self, seq: Sequence, now: float) -> None:
        """Keep the pages of a request that has left for as long as the policy says."""
        if (until := self.policy.keep_until(seq, now)) > now:
            self.batch.pages.pin(seq, until)

    def suspend(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Take sequences out between two steps that are to go on later: `add` queues them again, with their tokens.

        Return those that the policy held only for these, which leave with them.
        """
        for seq in self._take_out(sequences, now):
            seq.preempt()
        for seq in sequences:
            self._notify(self.policy.on_cancel, seq, now)
        return self.sharing.let_go(now)

    def remove_all(self, sequences: list[Sequence], now: float, reason: str = "abort") -> list[Sequence]:
        """Take sequences out in one pass, between two steps; return the sequences that leave, these first.

        Finished sequences do not leave again. Sequences that the policy held only for these leave with them, since
        the step that would let them go would compute nothing.
        """
        leaving = [seq for seq in sequences if seq.state != "finished"]
        if not leaving:
            return []
        self._take_out(leaving, now)
        for seq in leaving:
            seq.finish_reason, seq.state, seq.finished_at = reason, "finished", now
            self._notify(self.policy.on_cancel, seq, now)
        return leaving + self.sharing.let_go(now)

    def _take_out(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        """Take sequences out of the queue and the batch; return those that had a slot."""
        waiting = [seq for seq in sequences if seq.state == "waiting"]
        running = [seq for seq in sequences if seq.state != "waiting"]
        if waiting:
            self.wait_clock.tick(now, self.number)
        self.queue.withdraw(waiting, now)
        self.sharing.vacate(running)
        return running

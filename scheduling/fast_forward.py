"""Many equal steps at once, for a simulator: nothing changes in them but the clock and the number of tokens."""

from __future__ import annotations

from scheduling.advance import Advanced
from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import UNKNOWN_TOKEN, Sequence


def identical_steps_ahead(scheduler: Scheduler, plan: Plan) -> int:
    """Return how many steps are sure to equal this plan, the first of them, unless a request arrives.

    All members decode, none leaves before the last of these steps, and no waiting request can join. The free pages
    suffice for all of them. With a speculator, while a waiting request may expire, and for a policy that estimates, no two
    steps are equal.
    """
    hooks = scheduler.hooks
    quiet = hooks.repeats and hooks.on_step is None and not hooks.preempts
    if scheduler.queue.next_expiry() is not None or scheduler.policy.estimates:
        return 1
    if scheduler.speculator is not None:  # a step may have drafts, and nobody knows how many of them are right
        return 1
    if not quiet or plan.joined or plan.paused or (scheduler.waiting and not admission_closed(scheduler)):
        return 1
    if not plan.decoding or plan.decoding < len(plan.sequences):
        return 1
    most = min([
        1 if seq.stop and not seq.answer_tokens else (seq.answer_tokens or seq.max_tokens) - len(seq.output_ids)
        for seq in plan.sequences
    ])  # fmt: skip
    return most if most == 1 else scheduler.batch.pages.steps_without_shortage(plan.sequences, most)


def admission_closed(scheduler: Scheduler) -> bool:
    """Return whether no request can join before another leaves, or arrives."""
    policy, running = scheduler.policy, bool(scheduler.running)
    in_order = not policy.order_name  # another order may change with time alone
    is_blocked = policy.blocks_until_change and in_order and scheduler.queue.blocked is not None
    closed = not scheduler.batch.free_slots or (running and (policy.closed or is_blocked))
    return closed and not scheduler.hooks.preempts


def fast_forward(scheduler: Scheduler, plan: Plan, ends: list[float]) -> None:
    """Let as many steps pass as `ends` has times; the plan, not computed yet, is the step after them.

    Each member gets a token, which is unknown, at each of these times, as from that many commits. Only fewer steps than
    `identical_steps_ahead` may pass.
    """
    _advance(scheduler, plan, ends)
    # Step by step, members would get the same pages in another order, which makes no difference that can be seen.
    scheduler.batch.pages.catch_up(plan.sequences, 1)
    _move(scheduler, plan, ends)


def commit_equal_steps(scheduler: Scheduler, plan: Plan, ends: list[float]) -> list[Sequence]:
    """Commit a plan and the steps after it that equal it, which end at these times; return the sequences that leave.

    There may be as many as `identical_steps_ahead`.
    """
    finished = _advance(scheduler, plan, ends)
    scheduler.batch.pages.catch_up(plan.sequences, 0)
    if len(ends) > 1:
        _move(scheduler, plan, ends[:-1])
    return scheduler.settle(plan, Advanced([], finished, True, [], 0.0), ends[-1])


def _advance(scheduler: Scheduler, plan: Plan, ends: list[float]) -> list[Sequence]:
    """Give each member a token at each of these times; return those that have all of theirs then."""
    on_token, steps, now = scheduler.hooks.on_token, len(ends), ends[-1]
    batch, number, tokens = len(plan.sequences) + len(plan.held), plan.number + len(ends) - 1, [UNKNOWN_TOKEN] * steps
    rows, finished = batch * steps, []
    if on_token is not None:
        for at in ends[:-1]:
            for seq in plan.sequences:
                seq.computed += 1
                seq.output_ids.append(UNKNOWN_TOKEN)
                seq.last_token_at = at
                on_token(seq, at)
        steps, tokens = 1, tokens[:1]
    for seq in plan.sequences:
        ids = seq.output_ids
        ids += tokens
        seq.computed += steps
        seq.last_token_at = now
        seq.last_iteration = number
        seq.batch_sum += rows
        if batch > seq.batch_max:
            seq.batch_max = batch
        if len(ids) >= (seq.answer_tokens or seq.max_tokens):
            seq.finish_reason, seq.state = (seq.stop and seq.stop(UNKNOWN_TOKEN)) or "length", "held"
            finished.append(seq)
        if on_token is not None:
            on_token(seq, now)
    return finished


def _move(scheduler: Scheduler, plan: Plan, ends: list[float]) -> None:
    """Make a plan the step that follows after those that end at these times."""
    plan.number, plan.repeats, plan.decoding = plan.number + len(ends), True, len(plan.sequences)
    plan.started_at = ends[-1]
    scheduler.number = plan.number
    # A request that arrives during the plan's own step begins to wait in it, not in the first of the steps that passed.
    scheduler.wait_clock.tick(plan.started_at, plan.number - 1)

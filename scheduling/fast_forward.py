"""Many equal steps at once, for a simulator: nothing changes in them but the clock and the number of tokens."""

from __future__ import annotations

from scheduling.iteration import Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import UNKNOWN_TOKEN


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
    if not plan.sequences or max(plan.counts) > 1:
        return 1
    most = plan.sequences[0].max_tokens
    for seq in plan.sequences:
        made = len(seq.output_ids)
        if not made or (seq.stop and not seq.answer_tokens) or len(seq.prompt_ids) + made - seq.computed > 1:
            return 1
        left = (seq.answer_tokens or seq.max_tokens) - made
        if left < most:
            most = left
    return scheduler.batch.pages.steps_without_shortage(plan.sequences, most)


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
    on_token, steps = scheduler.hooks.on_token, len(ends)
    batch, tokens = len(plan.sequences) + len(plan.held), [UNKNOWN_TOKEN] * len(ends)
    if on_token is not None:
        for now in ends:
            for seq in plan.sequences:
                seq.computed += 1
                seq.output_ids.append(UNKNOWN_TOKEN)
                seq.last_token_at = now
                on_token(seq, now)
    for seq in plan.sequences:
        if on_token is None:
            seq.computed += steps
            seq.output_ids.extend(tokens)
            seq.last_token_at = ends[-1]
        seq.batch_sum += batch * steps
    # Step by step, members would get the same pages in another order, which makes no difference that can be seen.
    scheduler.batch.pages.catch_up(plan.sequences)
    plan.number, plan.repeats, plan.decoding = plan.number + steps, True, len(plan.sequences)
    plan.started_at = ends[-1]
    scheduler.number = plan.number
    # A request that arrives during the plan's own step begins to wait in it, not in the first of the steps that passed.
    scheduler.wait_clock.tick(plan.started_at, plan.number - 1)

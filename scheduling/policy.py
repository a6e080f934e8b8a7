"""The hooks of a batching policy: which requests join, how many tokens each computes, and which leave.

A policy is one file in `policies/` with a class `Policy(scheduling.policy.Policy)` that overrides only what makes it
different. The scheduler calls these hooks before each step:

    preempt -> victim -> admit -> order -> blocked_by -> reserve_tokens -> allocate_tokens -> allocate_drafts

Then the model computes the step, and these follow:

    on_token (for each token) -> on_step -> release -> keep_until

A policy reads no clock and no random generator: what it needs is passed in, what it remembers is its own. Times are
seconds of the clock that the scheduler uses.

An order is such a class too, named `Order`, that decides who is first. `loop+order` inherits from both, the loop before
the order, so an `on_...` hook calls its `super()`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import signature
from math import inf
from typing import Any, NamedTuple, TypeVar

from scheduling.claims import Claims
from scheduling.draft_choice import DraftChoice
from scheduling.iteration import Plan
from scheduling.options import set_options
from scheduling.pages import in_whole_pages
from scheduling.sequence import Sequence

P = TypeVar("P", bound="Policy")


class PolicyError(Exception):
    """A policy's decision cannot be carried out; the message names the hook."""


class Budget(NamedTuple):
    """The slots and KV tokens that are free before a step, and the tokens that it may compute."""

    slots: int
    kv_tokens: int
    tokens: int = 1 << 60
    page_size: int = 1

    def fits(self, tokens: int) -> bool:
        """Return whether this many tokens of one sequence fit into the free KV pages."""
        return in_whole_pages(tokens, self.page_size) <= self.kv_tokens

    def minus(self, tokens: int) -> Budget:
        """Return what is left after one more sequence has taken a slot and its pages."""
        kv_tokens = self.kv_tokens - in_whole_pages(tokens, self.page_size)
        return Budget(self.slots - 1, kv_tokens, self.tokens, self.page_size)


class Policy:
    """Requests join and leave before any step, in order of arrival: Orca's dynamic batching."""

    padded = False  # the rows of a step are padded to the longest, and finished rows are computed too
    closed = False  # no request joins while another runs
    separate_prefill = False  # a step computes prompts or decodes, never both
    early = False  # a finished request is answered at once, although its row stays
    estimates = False  # new requests have an `estimate` when `refuse` is called, as soon as the time of steps is known
    times_steps = False  # it goes by the seconds of each step, which overlap in vLLM and which a queue in front of a server cannot see
    preempts = True  # `preempt` may return requests, if it is overridden
    # What kept the first in order from joining keeps it, and all others, until a request arrives, joins or leaves. A simulator
    # does not ask again before that.
    blocks_until_change = False
    max_batched_tokens = 1 << 60  # the policy's own limit on the tokens of one step
    margin = 64  # tokens for which a request gets KV pages when it joins, beside its own, if not for its whole answer
    order_name = ""  # of the order that it is combined with, if there is one

    _created_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    draining = False  # set by the scheduler: no more requests will arrive

    def __init_subclass__(cls) -> None:
        """Let an `__init__` that needs no arguments only set what a policy remembers, after options, slots and the bases."""
        own: Callable[..., None] | None = vars(cls).get("__init__")
        more = [] if own is None else [*signature(own).parameters.values()][1:]
        if own is None or any(each.default is each.empty or each.name == "max_batch_size" for each in more):
            return

        @wraps(own)
        def initialize(self: Policy, *args: Any, **options: Any) -> None:
            super(cls, self).__init__(*args, **options)
            own(self)

        cls.__init__ = initialize  # type: ignore[method-assign]

    def __new__(cls: type[P], *args: Any, **options: Any) -> P:
        policy = super().__new__(cls)
        policy._created_with = args, options
        return policy

    def __init__(self, max_batch_size: int = 0, **options: object) -> None:
        if hasattr(self, "claims") and not (
            max_batch_size or options
        ):  # called by an `__init__(self)`, which comes later
            return
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}, but must be at least 1. Raise it")
        self.max_batch_size = max_batch_size
        self.slots = max_batch_size  # of the engine; a policy that uses fewer leaves the others idle
        self.name = type(self).__module__.rpartition(".")[2].replace("_", "-")
        self.cached_tokens: Callable[[Sequence], int] = lambda seq: 0  # replaced by a scheduler with a prefix cache
        self.page_size = 1  # tokens of a KV page, set by such a scheduler
        self.kv_total = 0  # tokens of all KV pages, set by a scheduler that has some
        # For how many tokens a request could get pages now, without pinned ones; set by a scheduler that has pages.
        self.room: Callable[[Sequence], int] = lambda seq: 1 << 60
        in_order = type(self).order is Policy.order  # requests join from the head of a queue in order of arrival
        self.claims = Claims(conserving=type(self).admit is Policy.admit, overtaking_tokens=0 if in_order else inf)
        set_options(self, options)

    def renew(self: P) -> P:
        """Return a new policy as this one was when it was created."""
        args, options = self._created_with
        policy = type(self)(*args, **options)
        policy.name, policy.slots = self.name, self.slots
        return policy

    def refuse(self, seq: Sequence, now: float) -> bool:
        """Return whether to turn a new request away instead of queueing it."""
        return False

    def expires_at(self, seq: Sequence) -> float:
        """Return when a new request is turned away that has not joined until then; infinity for never."""
        return inf

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        """Return the waiting requests, the first to join first; `waiting` is in order of arrival, after the preempted.

        It may be a generator, which yields the next request after the previous one has joined. All hooks read `waiting`
        as a list, and none can change it: sorted(waiting, ...) is a new one.
        """
        return waiting

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        """Return how many requests may join now, from the head of the order, as far as their pages fit."""
        return min(len(waiting), budget.slots)

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        """Return what keeps the next request from joining, or None: slots_full, token_budget, kv_full, policy_order or window.

        Called for each request that `admit` counted; `running` includes those that have just joined.
        """
        return None

    def reserve_tokens(self, seq: Sequence) -> int:
        """Return for how many tokens a request gets KV pages when it joins, its known tokens at least.

        It gets more pages as it grows and, when none is free, `victim` names the request that loses its own. The
        default is the whole answer that a request asks for, or a margin if its client named no length. In a padded or
        closed loop a victim would wait for the whole batch, so there it is always the whole answer.
        """
        if self.padded or self.closed or not seq.open_ended:
            return seq.total
        return seq.length + self.margin

    def victim(self, running: list[Sequence], now: float) -> Sequence:
        """Return the request that loses its slot and pages to those that grow; it is recomputed later.

        Called when no page is free, with at least two unfinished requests in the order in which they joined.
        """
        return running[-1]

    def preempt(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float
    ) -> list[Sequence]:
        """Return the requests that lose their slots and pages now, and are recomputed later."""
        return []

    def allocate_tokens(self, running: list[Sequence], token_budget: int) -> list[int]:
        """Return how many tokens each running request computes in this step, 0 for none.

        Decodes come first, so that no stream stalls. Prompts share the rest in the order of their admission, and the
        last is cut (Sarathi-Serve, OSDI 2024; without a budget: Orca). With `separate_prefill`, decodes pause while
        prompts are computed (vLLM v0, TGI).
        """
        if self.separate_prefill and any(seq.is_prefilling for seq in running):
            return _to_prompts(running, token_budget)
        counts = [  # `pending` written out, as it is asked of each row of each step
            0 if seq.finish_reason is not None else len(seq.prompt_ids) + len(seq.output_ids) - seq.computed
            for seq in running
        ]
        decodes = counts.count(1)
        left = token_budget - decodes
        for i, count in enumerate(counts if decodes < len(counts) else ()):
            if count > 1:
                counts[i] = max(0, min(count, left))
                left -= counts[i]
        return counts

    def allocate_drafts(self, choice: DraftChoice) -> list[int]:
        """Return how many drafts each of `choice.sequences` computes in this step, at most `choice.most`, 0 for none.

        Called when the server speculates and there are drafts to choose from. The default is what brings the most tokens
        per second.
        """
        return choice.best()

    def release(self, running: list[Sequence]) -> list[Sequence]:
        """Return the requests that leave and are answered after this step."""
        return [seq for seq in running if seq.finish_reason is not None]

    def keep_until(self, seq: Sequence, now: float) -> float:
        """Return until when the cached pages of a request that has left stay pinned for the next call of its session.

        Called after `on_finish` or `on_cancel`. A time that is not after `now` pins nothing. A request that joins or grows
        takes pinned pages if no others are free.
        """
        return now

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        """Return when to call `admit` again although nothing arrives, or None; only called while no request runs."""
        return None

    def on_arrival(self, seq: Sequence, now: float) -> None:
        """Note that a request arrived."""

    def on_admit(self, seq: Sequence, now: float) -> None:
        """Note that a request joined; after a live switch, also each request that was running."""

    def on_preempt(self, seq: Sequence, now: float) -> None:
        """Note that a request lost its slot and waits again: as if it had just arrived, unless this is overridden.

        So a policy with a queue of its own cannot lose it.
        """
        if type(self).on_preempt is Policy.on_preempt:
            self.on_arrival(seq, now)

    def on_token(self, seq: Sequence, now: float) -> None:
        """Note that a request generated a token, or `seq.new_tokens` at once, in front of another server."""

    def on_step(self, plan: Plan, now: float) -> None:
        """Note that a step was computed, from `plan.started_at` to `now`; no request has left yet."""

    def on_finish(self, seq: Sequence, now: float) -> None:
        """Note that a request left, for any reason."""

    def on_cancel(self, seq: Sequence, now: float) -> None:
        """Note that a request left, waiting or running, without all its tokens."""
        self.on_finish(seq, now)


def _to_prompts(running: list[Sequence], left: int) -> list[int]:
    """Give all tokens to the prompts that are not computed yet, in the order of their admission."""
    counts = []
    for seq in running:
        count = min(seq.pending, left) if seq.is_prefilling and not seq.is_finished else 0
        left -= count
        counts.append(count)
    return counts

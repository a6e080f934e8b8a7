"""What a batching policy may decide: who is first, who joins, how many tokens each computes, who leaves.

A policy is one file in `policies/` with a class `Policy(scheduling.policy.Policy)` that overrides only what makes
it itself. It reads no clock and no random generator: what it needs is passed in, what it remembers is its own.
An order is such a class too, called `Order`, that decides who is first; `loop+order` inherits from both, the loop
before the order, so whoever overrides an `on_...` hook calls `super()`'s as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from scheduling.iteration import Plan
from scheduling.options import set_options
from scheduling.renamed import Renamed, RenamedWarning, adopt
from scheduling.sequence import Sequence


class Budget(NamedTuple):
    """What is free before an iteration, and how many tokens one step may compute."""

    slots: int
    kv_tokens: int
    tokens: int = 1 << 60
    page_size: int = 1

    def fits(self, tokens: int) -> bool:
        """Whether so many tokens of one sequence fit into the free KV pages."""
        return -(-tokens // self.page_size) * self.page_size <= self.kv_tokens

    def minus(self, tokens: int) -> Budget:
        """Return what is left when one more sequence has taken a slot and its pages."""
        kv_tokens = self.kv_tokens - -(-tokens // self.page_size) * self.page_size
        return Budget(self.slots - 1, kv_tokens, self.tokens, self.page_size)


class Policy:
    """Join and leave at any iteration, in order of arrival: the defaults are Orca's dynamic batching."""

    padded = False  # rows of a step are padded to the longest, and finished rows are computed on
    closed = False  # nobody joins while somebody runs
    separate_prefill = False  # a step computes prompts or decodes, never both
    early = False  # who has all its tokens is answered at once, though its row stays
    holds = False  # who has all its tokens keeps its slot until the batch is done
    overruns = False  # a batch may run on when all its members are done
    fair = False  # between clients, within the bound of VTC's theorem, if the order is an order's own
    conserving = True  # no slot stays empty while the next in order fits
    patience = 0.0  # how long the oldest may wait though nobody runs; inf: until nobody comes any more
    # Which of client, priority, deadline, prefix and length its order goes by. Where requests do not differ in any
    # of them, it can only go by arrival, and the simulator says so.
    heeds: tuple[str, ...] = ()
    refuses = False  # `refuse` may turn requests away
    preempts = True  # `preempt` may name somebody, where it is overridden
    max_batched_tokens = 1 << 60  # tokens that one step may compute, where that is the policy's own

    draining = False  # nobody will arrive any more; the scheduler says so

    apart = Renamed("separate_prefill")
    displaces = Renamed("preempts")

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        adopt(cls)

    def __init__(self, max_batch_size: int, **options: object) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}, but must be at least 1. Raise it")
        self.max_batch_size = max_batch_size
        self.name = type(self).__module__.rpartition(".")[2].replace("_", "-")
        self.cached_tokens: Callable[[Sequence], int] = lambda seq: 0  # the scheduler knows better
        set_options(self, options)

    def refuse(self, seq: Sequence, now: float) -> bool:
        """Return whether a sequence that arrives is turned away instead of waiting."""
        return False

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        """Return who waits, first to join first; `waiting` comes in order of arrival.

        It may be a generator: each is asked for when the one before has joined.
        """
        return waiting

    def admit(self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float) -> int:
        """Return how many join now, from the head of the order, as far as their pages fit."""
        return min(len(waiting), budget.slots)

    def blocked_by(self, seq: Sequence, running: list[Sequence], budget: Budget) -> str | None:
        """Return what keeps the next in order from joining, one of WAIT_REASONS; None if nothing does.

        Asked for each of those that `admit` counted; who joined before is among `running` already.
        """
        return None

    def preempt(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float
    ) -> list[Sequence]:
        """Return who is taken off its slot now, loses its pages, and computes all its tokens anew later."""
        return []

    def allocate_tokens(self, running: list[Sequence], token_budget: int) -> list[int]:
        """Return how many tokens each running sequence computes in this step, 0 for none.

        Decodes come first, so that nobody's stream stalls; what is left of the budget goes to prompts in the
        order of their admission, the last one cut (Sarathi-Serve, OSDI 2024; all of them whole: Orca). A policy
        that sets `separate_prefill` lets decodes pause while a prompt is computed (vLLM v0, TGI).
        """
        if self.separate_prefill and any(seq.is_prefilling for seq in running):
            return self._allocate_to_prompts(running, token_budget)
        counts = [0 if seq.finish_reason is not None else seq.pending for seq in running]
        left = token_budget - counts.count(1)
        for i, count in enumerate(counts):
            if count > 1:
                counts[i] = max(0, min(count, left))
                left -= counts[i]
        return counts

    def _allocate_to_prompts(self, running: list[Sequence], left: int) -> list[int]:
        counts = []
        for seq in running:
            count = min(seq.pending, left) if seq.is_prefilling and not seq.is_finished else 0
            left -= count
            counts.append(count)
        return counts

    def release(self, running: list[Sequence]) -> list[Sequence]:
        """Return who leaves and is answered after this step."""
        return [seq for seq in running if seq.is_finished]

    def deadline(self, waiting: Collection[Sequence], now: float) -> float | None:
        """Return when to ask again though nothing arrives, None for never; asked while nobody runs."""
        return None

    def on_arrival(self, seq: Sequence, now: float) -> None:
        """Take note of a new sequence."""

    def on_admit(self, seq: Sequence, now: float) -> None:
        """Take note of a sequence that joined; after a live switch also of those that run already."""

    def on_preempt(self, seq: Sequence, now: float) -> None:
        """Take note of a sequence that was taken off its slot and waits again."""

    def on_token(self, seq: Sequence, now: float) -> None:
        """Take note of a generated token."""

    def on_step(self, plan: Plan, now: float) -> None:
        """Take note of a step that was computed from `plan.started_at` to now, before anybody leaves."""

    def on_finish(self, seq: Sequence, now: float) -> None:
        """Take note of a sequence that left, for whatever reason."""

    def on_cancel(self, seq: Sequence, now: float) -> None:
        """Take note of a sequence that left, waiting or running, without all its tokens."""
        self.on_finish(seq, now)

    displace, on_displace, obstacle, share = preempt, on_preempt, blocked_by, allocate_tokens  # former names


def __getattr__(name: str) -> type[Budget]:
    """Return Budget by its former name; AttributeError for any other."""
    if name != "Room":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("Room is now called Budget. Import scheduling.policy.Budget", RenamedWarning, stacklevel=2)
    return Budget

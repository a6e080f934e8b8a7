"""What a batching policy may decide: who is first, who joins, how many tokens each computes, who leaves.

A policy is one file in `policies/` with a class `Policy(scheduling.policy.Policy)` that overrides only what makes
it itself. It reads no clock and no random generator: what it needs is passed in, what it remembers is its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from scheduling.sequence import Sequence


class Room(NamedTuple):
    """What is free before an iteration."""

    slots: int
    kv_tokens: int


class Policy:
    """Join and leave at any iteration, in order of arrival: the defaults are Orca's dynamic batching."""

    padded = False  # rows of a step are padded to the longest, and finished rows are computed on

    def __init__(self, max_batch_size: int) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}, must be at least 1. Raise it")
        self.max_batch_size = max_batch_size

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        """Return who waits, first to join first; `waiting` comes in order of arrival."""
        return waiting

    def admit(
        self, waiting: Collection[Sequence], running: list[Sequence], room: Room, now: float
    ) -> int:
        """Return how many join now, from the head of the order, as far as their pages fit."""
        return min(len(waiting), room.slots)

    def share(self, running: list[Sequence], budget: int) -> list[int]:
        """Return how many tokens each running sequence computes in this step, 0 for none.

        Decodes come first, so that nobody's stream stalls; what is left of the budget goes to prompts in the
        order of their admission, the last one cut (Sarathi-Serve, OSDI 2024; all of them whole: Orca).
        """
        left = budget - sum(1 for seq in running if seq.pending == 1 and not seq.is_finished)
        counts = []
        for seq in running:
            count = 0 if seq.is_finished else seq.pending
            if count > 1:
                count = max(0, min(count, left))
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

    def on_token(self, seq: Sequence, now: float) -> None:
        """Take note of a generated token."""

    def on_finish(self, seq: Sequence, now: float) -> None:
        """Take note of a sequence that left, for whatever reason."""

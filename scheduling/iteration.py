"""The record of one step, from which everything that shows what happened is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scheduling.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """What one step computes: `counts[i]` tokens of `sequences[i]`, and for a padded policy its dead weight.

    `held` are finished members that still fill a slot; a padded step computes one row for each of them, and
    `padding` rows of nothing beside the prompts, as a rectangle of tokens would.
    """

    number: int
    started_at: float
    sequences: list[Sequence]
    counts: list[int]
    held: list[Sequence] = field(default_factory=list)
    padded: bool = False
    joined: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)  # they run, but compute nothing in this step
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def padding(self) -> int:
        """Rows beyond the longest-row rectangle's content, 0 unless padded."""
        if not self.padded or not self.counts:
            return 0
        return max(self.counts) * len(self.counts) - sum(self.counts)


class Member(NamedTuple):
    """One slot's part in a step: phase is prefill, decode, held or idle; computed and total count tokens."""

    id: str
    slot: int
    phase: str
    tokens: int
    computed: int
    total: int


class SlotSteps(NamedTuple):
    """How the slots of one step were spent; the five kinds add up to the number of slots.

    A slot whose sequence computes nothing is idle; recomputed is the share of what had been computed before.
    """

    useful: float = 0.0
    padding: float = 0.0
    held: float = 0.0
    idle: float = 0.0
    recomputed: float = 0.0


@dataclass(slots=True)
class Iteration:
    """One step as it happened: `t` and `seconds` on the scheduler's clock, `queue` those left waiting.

    `preempted` sequences lost their slots before it and wait again.
    """

    n: int
    t: float
    seconds: float
    policy: str
    queue: int
    members: list[Member]
    joined: list[str]
    left: list[tuple[str, str]]
    slot_steps: SlotSteps
    pages_used: int
    pages_total: int
    preempted: list[str] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """Rows that were computed, held ones too."""
        return sum(1 for m in self.members if m.phase != "idle")

    @property
    def tokens(self) -> int:
        return sum(m.tokens for m in self.members)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as `/events` and trace files have it."""
        preempted = {"displaced": self.preempted} if self.preempted else {}
        return {
            "n": self.n,
            "t": self.t,
            "seconds": self.seconds,
            "policy": self.policy,
            "queue": self.queue,
            "members": [m._asdict() for m in self.members],
            "joined": self.joined,
            "left": [{"id": id, "reason": reason} for id, reason in self.left],
            **preempted,
            "slot_steps": self.slot_steps._asdict(),
            "pages": {"used": self.pages_used, "total": self.pages_total},
        }

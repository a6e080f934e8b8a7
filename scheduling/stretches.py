"""Equal steps in a row as one record, so that a long recording stays small. Pure.

Between two changes of the batch, steps differ only in their time and in the tokens computed so far. A `Stretch` keeps the
first of them, their number and when the last one ended. This module must not know where records come from or go.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

from scheduling.iteration import Columns, Drafted, Experts, Iteration, Members, SlotSteps

CONSTANT = 4  # the first fields of a member, which are equal in all steps of a stretch: id, slot, phase, tokens


@dataclass(slots=True)
class Stretch:
    """A number of equal steps: the fields of the first one, when the last one ended, and who left in it."""

    n: int
    t: float
    ended: float
    steps: int
    policy: str
    queue: int
    joined: list[str]
    left: list[tuple[str, str]]
    preempted: list[str]
    slot_steps: tuple[float, ...]
    pages_used: int
    pages_total: int
    blocked_by: str | None
    members: Members
    drafts: list[Drafted] = field(default_factory=list)
    mask_seconds: float = 0.0  # of all its steps
    experts: Experts | None = None  # read by all its steps together
    rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, step: Iteration) -> Stretch:
        """Return a stretch of this step alone."""
        return cls(
            step.n, step.t, step.t + step.seconds, 1, step.policy, step.queue, list(step.joined), list(step.left),
            list(step.preempted), tuple(step.slot_steps), step.pages_used, step.pages_total,
            step.blocked_by, step.members, step.drafts, step.mask_seconds, step.experts, step.rows,
        )  # fmt: skip

    def extend(self, step: Iteration) -> bool:
        """Add a step if it equals those before it; otherwise return False."""
        if (
            self.left or step.joined or step.preempted or step.drafts or self.drafts
            or self.queue != step.queue or step.n != self.n + self.steps
            or self.slot_steps != step.slot_steps or (self.policy, self.rows) != (step.policy, step.rows) or self.blocked_by != step.blocked_by
        ):  # fmt: skip
            return False
        if step.members.shared[:CONSTANT] != self.members.shared[:CONSTANT]:
            return False
        self.steps += 1
        self.ended = step.t + step.seconds
        self.mask_seconds += step.mask_seconds
        if self.experts and step.experts:
            self.experts = step.experts._replace(read=self.experts.read + step.experts.read)
        self.left = list(step.left)
        return True

    @classmethod
    def of_row(cls, row: list[Any]) -> Stretch:
        """Return the stretch that `row` returned, as JSON has it."""
        stretch = cls(*row)
        stretch.members = Members(Columns(*map(tuple, row[MEMBERS])))
        return stretch

    def row(self) -> list[Any]:
        """Return the fields in their order, of the members their columns."""
        return [getattr(self, name) if name != "members" else self.members.columns for name in NAMES]

    def to_dict(self) -> dict[str, Any]:
        """Return the record of the first step, with `repeat` equal steps of `seconds` each; `left` is of the last one."""
        step = Iteration(
            n=self.n, t=self.t, seconds=(self.ended - self.t) / self.steps, policy=self.policy, queue=self.queue,
            members=self.members,
            joined=self.joined, left=[(id, reason) for id, reason in self.left],
            slot_steps=SlotSteps(*self.slot_steps), pages_used=self.pages_used, pages_total=self.pages_total,
            preempted=self.preempted, blocked_by=self.blocked_by,
            drafts=[Drafted(*drafted) for drafted in self.drafts], mask_seconds=self.mask_seconds / self.steps,
            experts=self.experts and Experts(self.experts.read / self.steps, self.experts.of),
            rows=self.rows,
        )  # fmt: skip
        return step.to_dict() | {"repeat": self.steps}


NAMES = [one.name for one in fields(Stretch)]
MEMBERS = NAMES.index("members")


class Stretches:
    """The latest steps as stretches, at most `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.kept: deque[Stretch] = deque(maxlen=limit)

    def add(self, step: Iteration) -> None:
        """Record a step."""
        if not (self.kept and self.kept[-1].extend(step)):
            self.kept.append(Stretch.of(step))

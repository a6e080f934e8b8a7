"""Equal steps in a row as one record, so that a long recording stays small. Pure.

Between two changes of the batch, steps differ only in their time and in the tokens computed so far. A `Stretch` keeps the
first of them, their number and when the last one ended. This module must not know where records come from or go.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any

from scheduling.iteration import Columns, Drafted, Experts, Iteration, Members, SlotSteps

CONSTANT = 4  # the first fields of a member, which are equal in all steps of a stretch: id, slot, phase, tokens
STEP = [one.name for one in fields(Iteration) if one.init]
ROW = [*STEP, "steps", "ended"]


@dataclass(slots=True)
class Stretch(Iteration):
    """A number of equal steps: the record of the first one, when the last one ended, and who left in it.

    Its `mask_seconds`, and what was read of `experts`, are those of all its steps together.
    """

    steps: int = 1
    ended: float = 0.0

    @classmethod
    def of(cls, step: Iteration) -> Stretch:
        """Return a stretch of this step alone."""
        stretch = cls(**{name: getattr(step, name) for name in STEP})
        stretch.ended = step.t + step.seconds
        return stretch

    def extend(self, step: Iteration) -> bool:
        """Add a step if it equals those before it; otherwise return False."""
        if (
            self.left or step.joined or step.preempted or step.drafts or self.drafts
            or self.queue != step.queue or step.n != self.n + self.steps
            or self.slot_steps != step.slot_steps or (self.policy, self.rows) != (step.policy, step.rows) or self.blocked_by != step.blocked_by
            or step.members.shared[:CONSTANT] != self.members.shared[:CONSTANT]
        ):  # fmt: skip
            return False
        self.steps += 1
        self.ended = step.t + step.seconds
        self.mask_seconds += step.mask_seconds
        if self.experts and step.experts:
            self.experts = step.experts._replace(read=self.experts.read + step.experts.read)
        self.left = step.left
        return True

    def row(self) -> list[Any]:
        """Return the fields in their order, of the members their columns."""
        return [self.members.columns if name == "members" else getattr(self, name) for name in ROW]

    @classmethod
    def of_row(cls, row: list[Any]) -> Stretch:
        """Return the stretch that `row` returned, as JSON has it."""
        own = dict(zip(ROW, row))
        own["members"], own["slot_steps"] = Members(Columns(*map(tuple, own["members"]))), SlotSteps(*own["slot_steps"])
        own["drafts"], own["experts"] = (
            [Drafted(*one) for one in own["drafts"]],
            own["experts"] and Experts(*own["experts"]),
        )
        return cls(**own)

    def to_dict(self, bare: bool = False) -> dict[str, Any]:
        """Return the record of the first step, with `repeat` equal steps of `seconds` each; `left` is of the last one."""
        experts = self.experts and self.experts._replace(read=self.experts.read / self.steps)
        seconds, masks = (self.ended - self.t) / self.steps, self.mask_seconds / self.steps
        step = replace(self, seconds=seconds, mask_seconds=masks, experts=experts)
        return Iteration.to_dict(step, bare) | {"repeat": self.steps}


class Stretches:
    """The latest steps as stretches, at most `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        self.kept: deque[Stretch] = deque(maxlen=limit)

    def add(self, step: Iteration) -> None:
        """Record a step."""
        if not (self.kept and self.kept[-1].extend(step)):
            self.kept.append(Stretch.of(step))

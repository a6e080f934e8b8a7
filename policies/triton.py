"""Triton's dynamic batching with its queue policies: levels of priority with queues of their own, sizes and timeouts.

Batches start as under `window`. Requests of a higher level join before those of lower ones. One that has waited in the queue
for its `timeout` is turned away (`reject`), or waits behind the others of its level from then on (`delay`). Within one level,
and among those that were delayed, an order decides, by default that of arrival. Source: NVIDIA Triton, ModelDynamicBatching
and ModelQueuePolicy, and PriorityQueue in its scheduler_utils.cc, whose options have the same names here, but seconds. Triton
looks for timeouts when it forms a batch, this policy before each step.
"""

from collections.abc import Collection, Iterable
from math import inf
from typing import Any, NamedTuple

from policies import window
from scheduling.options import OptionError, option
from scheduling.sequence import Sequence


class Level(NamedTuple):
    """The policy of one queue (ModelQueuePolicy), and the new requests in it."""

    timeout: float
    action: str
    override: str
    most: int
    waiting: dict[Sequence, None]


class Policy(window.Policy):
    priority_levels = option(0, "number of levels, of which 1 goes first; 0: one queue", low=0, high=1000)
    default_priority_level = option(1, "level of requests whose priority is not one of the levels", low=1)
    timeout: tuple[float, ...] = option(
        (0.0,), "maximum seconds in the queue, one value for all levels or one for each; 0: no limit", low=0.0
    )
    timeout_action: tuple[str, ...] = option(
        ("reject",), "what to do after the timeout, for all levels or for each", choices=("reject", "delay")
    )
    allow_timeout_override: tuple[str, ...] = option(
        ("off",), "whether slo_s may shorten the timeout, for all levels or for each", choices=("on", "off")
    )
    max_queue_size: tuple[int, ...] = option(
        (0,), "maximum waiting requests, for all levels or for each; 0: no limit", low=0
    )
    preserve_ordering = option(False, "send answers in the order of arrival, also from several instances")

    def __init__(self) -> None:
        count = max(1, self.priority_levels)
        if self.default_priority_level > count:
            raise OptionError(
                f"policy option default_priority_level is {self.default_priority_level}, but there are {count} priority_levels. "
                "Use one of them"
            )
        names = ("timeout", "timeout_action", "allow_timeout_override", "max_queue_size")
        self._levels = [Level._make((*values, {})) for values in zip(*(self._of_each(name, count) for name in names))]
        delays = any(level.timeout and level.action == "delay" for level in self._levels)
        if self.preserve_ordering and (count > 1 or delays):  # as in Triton
            raise OptionError(
                "policy option preserve_ordering is on, but priority levels and timeout_action=delay change the order. "
                "Leave it out, or use one level and no delay"
            )
        claims, uses = self.claims.without_order(), ["priority"] * (count > 1)
        in_order = type(self).order is Policy.order and not self.order_name and count == 1 and not delays
        claims = claims.but(overtaking_tokens=0 if in_order else inf)
        uses += ["deadline"] * any(level.timeout and level.override == "on" for level in self._levels)
        refuses = any(level.most or (level.timeout and level.action == "reject") for level in self._levels)
        self.claims = claims.but(refuses=claims.refuses or refuses, uses=(*uses, *claims.uses))

    def _of_each(self, name: str, count: int) -> tuple[Any, ...]:
        """Return an option's value for each level."""
        values: tuple[Any, ...] = getattr(self, name)
        if len(values) not in (1, count):
            raise OptionError(
                f"policy option {name} has {len(values)} values for {count} levels. Give one for all, or one for each"
            )
        return values * count if len(values) == 1 else values

    def _number(self, seq: Sequence) -> int:
        named = 1 <= seq.priority <= self.priority_levels
        return (seq.priority if named else self.default_priority_level) - 1

    def _times_out_at(self, seq: Sequence, action: str) -> float:
        """Return when a request times out if this action follows, infinity if it does not. One that has begun never does."""
        level = self._levels[self._number(seq)]
        if not level.timeout or level.action != action or seq.scheduled_at is not None:
            return inf
        own = seq.deadline if level.override == "on" and seq.deadline is not None else inf
        return min(seq.arrived_at + level.timeout, own)

    def refuse(self, seq: Sequence, now: float) -> bool:
        level = self._levels[self._number(seq)]
        return bool(level.most and len(level.waiting) >= level.most) or super().refuse(seq, now)

    def expires_at(self, seq: Sequence) -> float:
        return min(super().expires_at(seq), self._times_out_at(seq, "reject"))

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return sorted(
            super().order(waiting, now), key=lambda seq: (self._number(seq), now >= self._times_out_at(seq, "delay"))
        )

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        if seq.scheduled_at is None:
            self._levels[self._number(seq)].waiting[seq] = None

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._levels[self._number(seq)].waiting.pop(seq, None)

    def on_cancel(self, seq: Sequence, now: float) -> None:
        super().on_cancel(seq, now)
        self._levels[self._number(seq)].waiting.pop(seq, None)

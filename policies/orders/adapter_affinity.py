"""Adapter affinity: requests whose adapter is in the batch go first, so that a step reads few adapters.

A step reads an adapter once for all of its rows, so a batch of few adapters costs less than one of many (Punica, Chen et
al., 2023; S-LoRA, Sheng et al., 2023, clusters requests for the same reason). Requests without an adapter cost nothing and
count as if theirs were in the batch. The others follow adapter by adapter, the one that has waited longest first. A request
that has waited for more than `guard` seconds goes before all.
"""

from collections.abc import Collection, Iterable
from itertools import chain

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    guard = option(10.0, "seconds of waiting after which a request goes first, whatever its adapter", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("adapter",), guard=self.guard, overtaking_tokens=0)
        self._in_batch: dict[Sequence, None] = {}

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        here = {"", *(seq.adapter for seq in self._in_batch)}
        overdue: list[Sequence] = []
        near: list[Sequence] = []
        far: dict[str, list[Sequence]] = {}
        for seq in waiting:
            if now - seq.arrived_at > self.guard:
                overdue.append(seq)
            elif seq.adapter in here:
                near.append(seq)
            else:
                far.setdefault(seq.adapter, []).append(seq)
        overdue.sort(key=lambda seq: seq.arrived_at)
        return [*overdue, *near, *chain.from_iterable(far.values())]

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        self._in_batch[seq] = None

    def on_preempt(self, seq: Sequence, now: float) -> None:
        super().on_preempt(seq, now)
        self._in_batch.pop(seq, None)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._in_batch.pop(seq, None)

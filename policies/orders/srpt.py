"""Shortest remaining work first, with preemption (TRAIL, arXiv 2410.01035): the requests with the least work left run.

A running request is preempted for one with less predicted work left, and recomputed later, but only while the number of
its tokens is below `c` times its prediction: the nearer the end, the more is lost. A request that joins is not
preempted until it has generated a token.
"""

from collections.abc import Collection

from policies.orders._predictions import Predicting
from policies.orders._sorted import Sorted
from scheduling.options import option
from scheduling.policy import Budget
from scheduling.sequence import Sequence


class Order(Predicting, Sorted):
    c = option(0.8, "fraction of the predicted length after which a request is not preempted", low=0.0, high=1.0)

    def key(self, seq: Sequence, now: float) -> float:
        return self.predict(seq) - len(seq.output_ids)

    def preempt(
        self, waiting: Collection[Sequence], running: list[Sequence], budget: Budget, now: float
    ) -> list[Sequence]:
        if budget.slots or not waiting:
            return []
        return self._outranked([s for s in running if self._may_go(s)], lambda seq: self.key(seq, now))

    def _may_go(self, seq: Sequence) -> bool:
        young = len(seq.output_ids) < self.c * self.predict(seq)
        return young and seq.has_progressed and not seq.is_finished

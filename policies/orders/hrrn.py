"""Highest response ratio next (Brinch Hansen 1971): the longest wait relative to the prompt tokens left to compute goes first.

The response ratio is (wait + s) / s, where s is the time to compute the prompt tokens that were not in the prefix cache when
the request arrived, one at least. SGLang merged it in 2026 (PR 32911), and Astraea (arXiv 2512.14142) has it for agents. A
measured pace would divide the s of all requests alike, so the order needs none: it is that of wait / tokens. Left out: the
length of the answer.

A request j that came D seconds after i passes it only if s_j < s_i, and only once i has waited for D s_i / (s_i - s_j). That
does not bound how many pass: in an overload short ones come faster than the ratio of a long one grows. Hence the guard.
"""

from collections.abc import Collection, Iterable

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    guard = option(100.0, "seconds of waiting after which the oldest request goes first", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(guard=self.guard, overtaking_tokens=0)
        self._sizes: dict[Sequence, int] = {}  # prompt tokens to compute, since the cache changes them while it waits

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        return sorted(waiting, key=lambda seq: self._rank(seq, now))

    def _rank(self, seq: Sequence, now: float) -> tuple[bool, float]:
        waited = now - seq.arrived_at
        return (False, seq.arrived_at) if waited > self.guard else (True, -waited / self._sizes[seq])

    def on_arrival(self, seq: Sequence, now: float) -> None:
        super().on_arrival(seq, now)
        self._sizes.setdefault(seq, max(1, seq.pending - self.cached_tokens(seq)))

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self._sizes.pop(seq, None)

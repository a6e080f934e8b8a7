"""Longest prefix match (SGLang, arXiv 2312.07104): the request with most of its prompt in the cache goes first.

Similar prompts then run one after the other while their pages are still cached. With more than `most` waiting requests,
the search costs more than it saves, and the order is first come, first served (SGLang: 128). So that no request starves
behind others with cached prompts, one that has waited for more than `guard` seconds goes before all.
"""

from collections.abc import Collection, Iterable

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    most = option(128, "queue length above which requests are served first come, first served", low=0)
    guard = option(100.0, "seconds of waiting after which a request goes first, whatever is cached of it", low=0.0)

    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("prefix",), guard=self.guard, overtaking_tokens=0)

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        if len(waiting) > self.most:
            return waiting
        overdue = [seq for seq in waiting if now - seq.arrived_at > self.guard]
        others = [seq for seq in waiting if now - seq.arrived_at <= self.guard] if overdue else waiting
        overdue.sort(key=lambda seq: seq.arrived_at)
        return [*overdue, *sorted(others, key=self.cached_tokens, reverse=True)]

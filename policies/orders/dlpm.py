"""Deficit longest prefix match (Cao et al. 2025, arXiv 2501.14312): fair between clients, without giving up the prefix cache.

Among the clients with a deficit left, the request with most of its prompt in the cache goes first. What is computed for a
client is subtracted from its deficit: prompt tokens that were not cached when a request joins, and tokens as they are generated.
When no waiting client has any left, each gets a quantum, as in `drr`. A larger quantum finds more in the cache and is less
fair: two clients that both have requests waiting differ in service by VTC's bound and two quanta at most.

Left out: the paper's second level (D2LPM), which spreads clients over several engines.
"""

from policies.orders import drr
from scheduling.sequence import Sequence


class Order(drr.Order):
    def __init__(self) -> None:
        self.claims = self.claims.but(uses=("client", "prefix"))

    def price_of_joining(self, seq: Sequence) -> float:
        return self.price(seq.pending, 0)  # what it found in the cache counts as computed

    def head(self, client: str, passed: dict[Sequence, None]) -> Sequence | None:
        waiting = (seq for seq in self._queue_of(client) if seq not in passed)
        return max(waiting, key=self.cached_tokens, default=None)

    def chosen(self, heads: list[Sequence]) -> Sequence:
        return max(heads, key=self.cached_tokens)

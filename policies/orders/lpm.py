"""Longest prefix match (SGLang, arXiv 2312.07104): the request with most of its prompt in the cache goes first.

Similar prompts then run one after the other while their pages are still cached. With more than `most` waiting requests,
the search costs more than it saves, and the order is first come, first served (SGLang: 128).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from scheduling import policy
from scheduling.options import option
from scheduling.sequence import Sequence


class Order(policy.Policy):
    most = option(128, "queue length above which requests are served first come, first served", low=0)

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self.claims = replace(self.claims, heeds=("prefix",))

    def order(self, waiting: Collection[Sequence], now: float) -> Iterable[Sequence]:
        if len(waiting) > self.most:
            return waiting
        return sorted(waiting, key=self.cached_tokens, reverse=True)

"""Which cached page goes first when a request needs one: the hook of an eviction policy, and the ranking it fills.

An eviction is one file in `policies/eviction/` with a class `Eviction(scheduling.eviction.Eviction)`. When a request
leaves, it says what the request's pages are worth from then on. The page with the least worth goes first; of pages worth
the same, the least recently used, and a prefix after its tail. Pages without findable content go before all others.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from scheduling.sequence import Sequence

UNKNOWN = float("-inf")  # the worth of a page that no request has left yet


class Eviction:
    """Least recently used: all pages are worth the same."""

    ranks = True  # whether `worths` tells pages apart; without it the pool keeps no ranking
    uses = ""  # the field of requests that it goes by: session or keep_s
    clairvoyant = False  # whether it needs `foresee`, so that only a simulator can have it

    def foresee(self, sequences: Iterable[Sequence]) -> None:
        """Note all requests that will arrive, in order, with the hashes of their prompts."""

    def worths(self, seq: Sequence, before: list[float]) -> list[float]:
        """Return what the pages of a request that leaves or is preempted are worth, the first page first.

        `before` is what they were worth when a request last left them, UNKNOWN for those that are new. The pages of a
        prefix must not be worth less than what follows them, or they leave a tail that nothing finds.
        """
        return before

    def on_evict(self, worth: float) -> None:
        """Note that the page that was worth least has gone."""


class Ranking(OrderedDict[int, float]):
    """The worth of pages, of which `popitem` takes the least, the one that was added first of those worth the same.

    A heap, whose outdated entries are skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, int]] = []
        self._entries: dict[int, tuple[float, int, int]] = {}
        self._added = 0

    def __setitem__(self, page: int, worth: float) -> None:
        super().__setitem__(page, worth)
        self._added += 1
        entry = self._entries[page] = (worth, self._added, page)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self) + 64:
            self._heap = sorted(self._entries.values())

    def __delitem__(self, page: int) -> None:
        super().__delitem__(page)
        del self._entries[page]

    def popitem(self, last: bool = False) -> tuple[int, float]:
        """Take the page that goes first; KeyError when there is none."""
        if not self:
            raise KeyError("there is no page")
        while True:
            entry = heapq.heappop(self._heap)
            worth, _, page = entry
            if self._entries.get(page) == entry:
                del self[page]
                return page, worth

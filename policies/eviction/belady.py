"""The page that is needed again latest, or never: the optimum, which knows all requests (simulator only).

Belady (IBM Systems Journal 1966). Requests served one after the other, in a given order, find no more pages with any
other eviction. Proof: a page is found only if it stayed since its last use, so it occupies a place over the requests
between. Of these intervals, at most c(t) may cross request t, which leaves c(t) pages to others. Go through the requests
in order. Where too many intervals cross, drop the one that ends last, I. A best choice that keeps I drops another one, J,
there. Keep J instead: from t on it takes a place no longer than I, and before t all that is not dropped yet fits. So some
best choice drops what this one drops. A prefix is needed no later than its tail, is released after it and so goes after
it, which is why no page stays that is cut off from its prefix.

The proof is for prompts that do not end where a page ends. One token of a prompt is always computed, so such a page is
computed again even if it is cached, and could have gone for nothing; this does not see that. Among requests that overlap,
or whose order depends on what is found, it is a heuristic.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

from scheduling import eviction
from scheduling.sequence import Sequence


class Eviction(eviction.Eviction):
    clairvoyant = True

    def __init__(self) -> None:
        self._uses: defaultdict[bytes, deque[tuple[int, Sequence]]] = defaultdict(deque)

    def foresee(self, sequences: Iterable[Sequence]) -> None:
        for place, seq in enumerate(sequences):
            for key in seq.hashes:
                self._uses[key].append((place, seq))

    def worths(self, seq: Sequence, before: list[float]) -> list[float]:
        if seq.finish_reason is None:  # it was preempted, and comes back before all others
            return [1.0] * len(before)
        return [-self._next_use(key) for key in seq.hashes]

    def _next_use(self, key: bytes) -> float:
        """Return the place of the next request that is yet to join and needs this page, infinity if none does."""
        uses = self._uses.get(key)
        while uses and uses[0][1].state != "waiting":
            uses.popleft()
        return uses[0][0] if uses else float("inf")

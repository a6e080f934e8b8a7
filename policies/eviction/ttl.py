"""The page whose time to live ends first: `keep_s` seconds after the last request that used it (Continuum, arXiv 2511.02230).

A client that pauses for a tool and comes back says so with `keep_s`. Pages without it end at once, so all whose time is
over go before those that are kept, least recently used first; if memory needs a kept page nevertheless, the next to end
goes. A page that several requests share is kept as long as the longest of them asks. With no `keep_s` it is `lru`.
"""

from scheduling import eviction
from scheduling.sequence import Sequence


class Eviction(eviction.Eviction):
    uses = "keep_s"

    def worths(self, seq: Sequence, before: list[float]) -> list[float]:
        used = next(at for at in (seq.last_token_at, seq.scheduled_at, seq.arrived_at) if at is not None)
        return [max(worth, used + seq.keep_s) for worth in before]

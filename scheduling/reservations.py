"""The KV pages of the scheduler's sequences: reserved when one joins, published when computed, released when it leaves.

Without a pool, as in most simulations, pages are unlimited.
"""

from __future__ import annotations

from scheduling.pages import PagePool
from scheduling.sequence import Sequence

ENDLESS = 1 << 60


class Reservations:
    """The pages of one pool, or unlimited ones, by sequence."""

    def __init__(self, pool: PagePool | None) -> None:
        self._pool = pool

    @property
    def free_tokens(self) -> int:
        """The tokens that the free pages can hold."""
        return ENDLESS if self._pool is None else self._pool.free * self._pool.page_size

    @property
    def page_size(self) -> int:
        return 1 if self._pool is None else self._pool.page_size

    @property
    def usage(self) -> tuple[int, int]:
        """The number of pages in use and of all pages."""
        return (0, 0) if self._pool is None else (self._pool.used, self._pool.total)

    def hash(self, seq: Sequence) -> None:
        """Hash the prompt of a sequence for the prefix cache, unless that is done."""
        if self._pool is not None and not seq.hashes:
            seq.hashes = self._pool.hashes(seq.prompt_ids)

    def cached_tokens(self, seq: Sequence) -> int:
        """Return how many prompt tokens are in the prefix cache now."""
        return 0 if self._pool is None else self._pool.cached_tokens(seq.hashes)

    def reserve(self, seq: Sequence) -> bool:
        """Take all pages that a sequence can ever need; return False if there are too few.

        What the prefix cache holds counts as computed.
        """
        if self._pool is None:
            return True
        reserved = self._pool.reserve(seq.hashes, seq.total, len(seq.prompt_ids))
        if reserved is None:
            return False
        seq.pages, seq.cached = reserved
        seq.computed = seq.cached
        return True

    def publish(self, seq: Sequence) -> None:
        """Let later prompts find the pages of this one, which must be computed."""
        if self._pool is not None and seq.hashes:
            self._pool.publish(seq.pages, seq.hashes)

    def release(self, seq: Sequence) -> None:
        """Give the pages of a sequence back."""
        if self._pool is not None and seq.pages:
            self._pool.release(seq.pages)
            seq.pages = []

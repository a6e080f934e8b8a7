"""The places of a server: one limit on the requests that are admitted, queued or running.

This module must not know what a request is.
"""

from __future__ import annotations

import threading


class Places:
    """A counter of places that any thread may take and give back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        # Taken under the locks of the inbox and of the registry, so nothing may be called while it is held.
        self.lock = threading.Lock()

    def take(self, n: int = 1) -> bool:
        """Take `n` places or none."""
        with self.lock:
            if self.taken + n > self.limit:
                return False
            self.taken += n
            return True

    def give_back(self, n: int) -> None:
        with self.lock:
            self.taken -= n

    def lend(self) -> Place | None:
        """Return a place for a request whose body is still to be read; None if all are taken."""
        return Place(self) if self.take() else None


class Place:
    """The places of one HTTP request: one at first, and more once its body says how many answers it wants.

    `is_claimed` is set when the registry of requests becomes responsible for giving them back.
    """

    __slots__ = ("_places", "count", "is_claimed")

    def __init__(self, places: Places, count: int = 1) -> None:
        self._places = places
        self.count = count
        self.is_claimed = False

    def take_more(self, n: int) -> bool:
        """Take `n` more places or none."""
        if not self._places.take(n):
            return False
        self.count += n
        return True

    def give_back(self) -> None:
        """Give all of its places back; only the first call has an effect."""
        with self._places.lock:
            self._places.taken -= self.count
            self.count = 0

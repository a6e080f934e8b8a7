"""A reload without a gap: the worker that serves goes on until the one that shall follow it can.

On SIGHUP gunicorn starts a new worker and tells the old one to end in the same breath, while the new one still has a
model to load. What the two must know of each other to do it one after the other is here.
It must not know gunicorn or HTTP.
"""

from __future__ import annotations

import mmap


class Succession:
    """Who serves after whom, in memory that workers share with the master they were forked from.

    Each worker has a number, and the newest the highest.
    """

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._given = 0

    def announce(self) -> int:
        """Return the number of a worker that is about to be started by the master, who asks."""
        self._given += 1
        self._shared[0] = self._given
        self._shared[2] = 0
        return self._given

    def withdraw(self, number: int, serving: int) -> bool:
        """Note, in the master, that a worker has ended; whether the one that serves stays for it."""
        if number != self._shared[0] or self.is_relieved(serving):
            return False
        self._shared[0] = serving
        return True

    def take_over(self, number: int) -> None:
        """Note, in the new worker, that it serves from now on."""
        self._shared[1] = max(number, self._shared[1])

    def bow_out(self, number: int) -> None:
        """Note, in the newest worker, that it has been told to end."""
        self._shared[2] = number

    def bows_out(self, number: int) -> bool:
        """Whether the worker that was to follow this one has been told to end."""
        return self._shared[2] > number

    def has_heir(self, number: int) -> bool:
        """Whether a worker has been started after this one, and has not failed."""
        return self._shared[0] > number

    def is_relieved(self, number: int) -> bool:
        """Whether a newer worker than this serves."""
        return self._shared[1] > number

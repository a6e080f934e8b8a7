"""What the processes of one configuration share: places, and a way for connections to the engine's process.

Made in gunicorn's master before it forks, so that a process that takes the place of another has it, too.
"""

from __future__ import annotations

import fcntl
import mmap
import tempfile
import threading
from collections.abc import Iterable
from itertools import count
from typing import Any

from launch.front_ends.workers import EngineWorker, FrontWorker
from launch.worker.handover import Handover
from serving.places import Place, Places

ENGINE = 0  # the number of the engine's process; front ends have 1, 2, ...


class Channel:
    """The shared parts, for a number of front ends."""

    def __init__(self, front_ends: int) -> None:
        self.handover = Handover()
        self.counts = mmap.mmap(-1, 8 * (front_ends + 2))
        self.lock = tempfile.TemporaryFile()  # noqa: SIM115  it is open as long as the server runs

    def cast(self, worker: Any, others: Iterable[Any]) -> None:
        """Make a worker, which is about to be forked, the engine's process or the front end that is missing."""
        # Those of the configuration before, during a reload, have a channel of their own.
        taken = {other.number for other in others if other.cfg is worker.cfg}
        worker.number = next(number for number in count() if number not in taken)
        worker.channel, worker.passing, worker.sources = self, [], [self.handover]
        worker.__class__ = FrontWorker if worker.number else EngineWorker  # gunicorn knows one class for all workers


class SharedPlaces(Places):
    """The places of a server, of which each process counts what it has taken, in memory that they share.

    The kernel gives the lock of a process that dies back, and the engine's process its places.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.lock = threading.Lock()
        self._file = channel.lock
        self._counts = memoryview(channel.counts).cast("q")  # the limit, then what each process has taken
        self._own = number + 1
        self._counts[self._own] = 0  # of the process before

    @property
    def limit(self) -> int:
        return self._counts[0]

    @limit.setter
    def limit(self, limit: int) -> None:
        self._counts[0] = limit

    @property
    def taken(self) -> int:  # type: ignore[override]
        return sum(self._counts[1:])

    def take(self, n: int = 1) -> bool:
        with self.lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                if self.taken + n > self.limit:
                    return False
                self._counts[self._own] += n
                return True
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def give_back(self, n: int) -> None:
        with self.lock:
            self._counts[self._own] -= n

    def lend(self) -> Place | None:
        return SharedPlace(self) if self.take() else None

    def free(self, number: int) -> None:
        """Give back all that a process had taken, because it has ended."""
        self._counts[number + 1] = 0


class SharedPlace(Place):
    """The places of one HTTP request."""

    def give_back(self) -> None:
        with self._places.lock:
            n, self.count = self.count, 0
        self._places.give_back(n)


class FormerPlaces(Places):
    """The places of an inbox until it got `SharedPlaces`, which gets back what these had lent."""

    successor: SharedPlaces

    @property
    def taken(self) -> int:
        return 0

    @taken.setter
    def taken(self, more: int) -> None:
        self.successor.give_back(-more)

    def take(self, n: int = 1) -> bool:
        return self.successor.take(n)

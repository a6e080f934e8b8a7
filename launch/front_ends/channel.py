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
from typing import IO, Any

from launch.front_ends.workers import EngineWorker, FrontWorker
from launch.worker.handover import Handover
from serving.places import Places

ENGINE = 0  # the number of the engine's process; front ends have 1, 2, ...


class Channel:
    """The shared parts, for a number of front ends."""

    def __init__(self, front_ends: int) -> None:
        self.handover = Handover()
        self.counts = mmap.mmap(-1, 8 * (front_ends + 1))
        self.lock = tempfile.TemporaryFile()  # noqa: SIM115  it is open as long as the server runs

    def cast(self, worker: Any, others: Iterable[Any]) -> None:
        """Make a worker, which is about to be forked, the engine's process or the front end that is missing."""
        # Those of the configuration before, during a reload, have a channel of their own.
        taken = {other.number for other in others if other.cfg is worker.cfg}
        worker.number = next(number for number in count() if number not in taken)
        worker.channel, worker.passing, worker.sources = self, [], [self.handover]
        worker.__class__ = FrontWorker if worker.number else EngineWorker  # gunicorn knows one class for all workers


class SharedLock:
    """Excludes the other threads of this process, and the other processes. The kernel takes it from one that dies."""

    def __init__(self, file: IO[bytes]) -> None:
        self._threads, self._file = threading.Lock(), file

    def __enter__(self) -> None:
        self._threads.acquire()
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._threads.release()


class SharedPlaces(Places):
    """The places of a server, of which each process counts what it has taken, in memory that they share."""

    def __init__(self, channel: Channel, number: int, limit: int = 0) -> None:
        self.limit, self.lock = limit, SharedLock(channel.lock)  # type: ignore[assignment]
        self._counts, self._own = memoryview(channel.counts).cast("q"), number
        self.free(number)  # of the process before

    @property
    def taken(self) -> int:
        return sum(self._counts)

    @taken.setter
    def taken(self, taken: int) -> None:
        self._counts[self._own] += taken - self.taken

    def free(self, number: int) -> None:
        """Give back all that a process had taken, because it has ended."""
        with self.lock:
            self._counts[number] = 0

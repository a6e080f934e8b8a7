"""Keep the threads that run Python on one processor, since only one of them can run Python at a time.

A thread that waits or calls the system hands Python's lock on. To a thread on another processor, that costs more than most
of what is done between two such calls: a wake-up there, and caches that have none of the interpreter's memory. Threads that
compute in C may use all processors. This module must not know what any thread does.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

EVERY = 1.0  # seconds between two choices
GLANCE = 0.2  # seconds until a new thread is placed: those that compute must not stay where the loop began them
TASKS = "/proc/self/task"
MUCH = 0.25  # of a processor


def choose(core: int, idle: Mapping[int, float], own: float) -> int:
    """Return the processor to use next: another one if other processes take much of this one, and leave more of that.

    `idle` is the idle share of each processor, `own` how many processors this process used.
    """
    best = max(idle, key=lambda other: idle[other])
    taken = 1 - idle[core] - own
    return best if min(taken, idle[best] - idle[core]) > MUCH else core


class OneCore:
    """The processor that the Python threads of this process share.

    Raises an AttributeError, OSError, ValueError or LookupError where a system does not tell what is needed, or forbids it.
    """

    def __init__(self) -> None:
        self.all = os.sched_getaffinity(0)
        self.core = random.choice(sorted(self.all))  # in containers, many servers have the same number
        self._allowed: dict[int, set[int]] = {}  # by thread, where it may run
        self._seen = self._read()
        os.sched_setaffinity(0, self.all)  # which shows that it is allowed

    def start(self) -> None:
        """Place the threads from now on, until the system refuses."""
        threading.Thread(target=self._run, name="one-core", daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError, ValueError, LookupError):
            while True:
                self.place()
                choose_at = time.monotonic() + EVERY
                while time.monotonic() < choose_at:
                    time.sleep(GLANCE)
                    if len(os.listdir(TASKS)) != len(self._allowed):
                        self.place()
                self.look()

    def look(self) -> None:
        """Choose the processor again."""
        (then, used, idle), self._seen = self._seen, self._read()
        now, used_by_now, idle_by_now = self._seen
        shares = {core: (idle_by_now[core] - idle[core]) / (now - then) for core in self.all}
        if random.random() < 0.5:  # two servers on one processor must not both leave it for the same other one
            self.core = choose(self.core, shares, (used_by_now - used) / (now - then))

    def place(self) -> None:
        """Let Python threads run on the one processor, and others on all: a thread begins where the one runs that starts it."""
        threads = {thread.native_id for thread in threading.enumerate()}
        before, self._allowed = self._allowed, {}
        for number in map(int, os.listdir(TASKS)):
            # The main thread has the number of its process; Python's own note of it is from before a fork.
            allowed = {self.core} if number in threads or number == os.getpid() else self.all
            if before.get(number) != allowed:
                self._allow(number, allowed)
            self._allowed[number] = allowed

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let the calling thread run on all processors meanwhile: it computes in C, and Python can go on beside it."""
        self._allow(0, self.all)
        try:
            yield
        finally:
            self._allow(0, {self.core})

    def _allow(self, thread: int, allowed: set[int]) -> None:
        """Let a thread run there, unless it has ended or those processors have been taken from the process."""
        with suppress(OSError):
            os.sched_setaffinity(thread, allowed)

    def _read(self) -> tuple[float, float, dict[int, float]]:
        """Return the time, and since some time in the past, the seconds that this process used and that processors were idle."""
        fields = (line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu"))
        idle = {int(name[3:]): float(some[3]) + float(some[4]) for name, *some in fields if name != "cpu"}
        return time.monotonic(), time.process_time(), {core: idle[core] / os.sysconf("SC_CLK_TCK") for core in self.all}

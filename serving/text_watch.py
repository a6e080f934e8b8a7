"""The watch over calls of the tokenizer and of the chat template, which come from files that may be anybody's.

A call that does not return holds a handler's thread, but neither the loop nor the interpreter, so nothing else would
notice it. This module must not know what a call does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from serving.watchdog import CHECK_SECONDS, Watched, dump_stacks

log = logging.getLogger(__name__)

TEXT_SECONDS = 30.0  # the largest text takes less than a second


class TextWatch:
    """Gives up the loop, so that the process starts again, when a call has lasted for twice `limit` seconds.

    `oldest` returns what identifies the oldest call in progress, None if there is none. Time counts only while the watch
    itself runs, so a process that was suspended does not count as hung.
    """

    def __init__(
        self,
        oldest: Callable[[], object | None],
        loop: Watched,
        limit: float = TEXT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        dump: Callable[[], None] = dump_stacks,
    ) -> None:
        self.seconds = 0.0  # that the oldest call has lasted
        self._oldest = oldest
        self._loop = loop
        self._limit = limit
        self._clock = clock
        self._dump = dump
        self._call: object | None = None
        self._checked_at = clock()
        self._has_dumped = False

    @property
    def stall(self) -> str | None:
        """The reason why no request is accepted, None while calls return in time."""
        return f"a text has been tokenized for {self.seconds:.0f} s" if self.seconds >= self._limit else None

    def start(self) -> None:
        """Check in a separate thread until the loop has ended."""
        threading.Thread(target=self._run, name="text-watch", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while self.check():
            pause.wait(min(CHECK_SECONDS, self._limit / 4))

    def check(self) -> bool:
        """Check once; return False when the loop has ended."""
        if not self._loop.is_alive:
            return False
        now, call = self._clock(), self._oldest()
        passed, self._checked_at = min(now - self._checked_at, 2 * CHECK_SECONDS), now
        if call is None or call is not self._call:
            self._call, self.seconds, self._has_dumped = call, 0.0, False
        else:
            self.seconds += passed
        if self.stall is not None and not self._has_dumped:
            self._has_dumped = True
            log.error("%s; thread stacks follow", self.stall)
            self._dump()
        if self.seconds >= 2 * self._limit:
            self._loop.give_up(f"{self.stall}, which the model's tokenizer or chat template does not end")
            return False
        return True

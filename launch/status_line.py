"""The server's one line on a terminal: what runs and waits, tokens per second, batch fill and KV pages.

It is redrawn in place while requests are open, and takes the place of the access log. Its thread only reads counters.
This module must not know HTTP.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TextIO

from api.service import LoadedEngine
from observe.meters import Meters
from scheduling.iteration import SlotSteps

REDRAW_SECONDS = 0.5
CLEAR = "\r\x1b[K"


class StatusLine:
    """Returns the line for the time since the line before."""

    def __init__(self, meters: Meters, clock: Callable[[], float] = time.perf_counter) -> None:
        self._meters = meters
        self._clock = clock
        self._at, self._tokens, self._spent = clock(), meters.generation_tokens, meters.spent

    def next(self, engine: LoadedEngine) -> str:
        """Return the line, for at most 80 columns."""
        now, tokens, spent = self._clock(), self._meters.generation_tokens, self._meters.spent
        rate = (tokens - self._tokens) / max(now - self._at, 1e-6)
        fill = SlotSteps(*(b - a for a, b in zip(self._spent, spent))).fill or 0.0
        self._at, self._tokens, self._spent = now, tokens, spent
        manager = engine.manager
        parts = [f"running {manager.running} of {manager.slots}", f"waiting {manager.waiting:,}",
                 f"{rate:,.0f} tokens/s", f"batch fill {fill:.0%}"]  # fmt: skip
        if manager.pages is not None and manager.pages.total:
            parts.append(f"KV {manager.pages.used / manager.pages.total:.0%}")
        return " · ".join(parts)


def start(stream: TextIO, meters: Meters, engine: Callable[[], LoadedEngine | None]) -> threading.Thread:
    """Draw the line in a thread of its own, from the moment when there is an engine until the process ends."""

    def draw() -> None:
        line, drawn = StatusLine(meters), ""
        while True:
            time.sleep(REDRAW_SECONDS)
            if (loaded := engine()) is None:
                continue
            text = line.next(loaded)
            if text == drawn or not (drawn or loaded.manager.running):  # nothing before the first request
                continue
            drawn = text
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                # Without a newline, so that the next line or message is written over this one.
                stream.write(f"{CLEAR}{text}\r")
                stream.flush()

    thread = threading.Thread(target=draw, name="status-line", daemon=True)
    thread.start()
    return thread

"""A server's own account of its steps: `/events` copied into a file while runs go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

import aiohttp

from .dialects import Events
from .target import CONNECT_SECONDS, Target

QUIET_SECONDS = 0.25
SETTLED_AT_MOST = 5.0


class EventRecorder:
    """Copies steps line by line; each line names the run it belongs to. It has a thread and a loop of its own."""

    def __init__(self, target: Target, file: TextIO) -> None:
        self._target = target
        self._file = file
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._labels: str | None = None
        self._heard = 0
        self.connected = False

    def start(self) -> None:
        """Begin to connect: some servers answer only when they have something to tell."""
        self._thread.start()

    def is_connected(self) -> bool:
        """Tell, a step after the start at the earliest, whether the server has events."""
        self._ready.wait(CONNECT_SECONDS)
        return self.connected

    def label(self, run: Mapping[str, Any] | None) -> None:
        """Name the run that the next steps belong to; None for steps that nobody wants."""
        self._labels = None if run is None else json.dumps(run)[1:-1]

    def settle(self) -> None:
        """Wait until nothing has come for a moment: events may come after the answers they tell of."""
        seen, end = -1, time.monotonic() + SETTLED_AT_MOST
        while self.connected and seen < self._heard and time.monotonic() < end:
            seen = self._heard
            time.sleep(QUIET_SECONDS)
        self._file.flush()

    def close(self) -> None:
        """Stop copying."""
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(10)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
            asyncio.run(self._follow())
        self._ready.set()

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        # Server and client pause with the load: silence is no reason to leave.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        url = self._target.url + "/events"
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=self._target.headers) as session,
            session.get(url, proxy=self._target.proxy) as answer,
        ):
            if answer.status != 200 or answer.content_type != "text/event-stream":
                return
            self.connected = True
            self._ready.set()
            events = Events()
            async for received in answer.content.iter_any():
                for data in events.cut(received):
                    self._write(data)

    def _write(self, data: bytes) -> None:
        self._heard += 1
        if self._labels is not None and b'"members"' in data and data.startswith(b"{"):
            self._file.write("{" + self._labels + ", " + data.decode("utf-8", "replace")[1:] + "\n")

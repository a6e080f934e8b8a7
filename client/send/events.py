"""A server's steps, from its `/events`: as they arrive, or copied into a file during the runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, TextIO

import aiohttp

from .dialects import fault
from .sse import Events, read_json
from .target import CONNECT_SECONDS, Target

QUIET_SECONDS = 0.25
MAX_SETTLE_SECONDS = 5.0


class NoEvents(Exception):
    """The server's answer to `/events` is no stream of events; the message says why."""


@contextlib.asynccontextmanager
async def watch(
    target: Target, headers: Mapping[str, str] | None = None, silence: float | None = None, **params: str
) -> AsyncIterator[AsyncIterator[tuple[str, bytes]]]:
    """Connect to `/events`; yield an iterator over the name and the data of each event. NoEvents if there are none.

    `silence` is for how many seconds a server may send nothing, not even a comment.
    """
    # No total timeout: there are no events while there is no load.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
    url = f"{target.url}/events"
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=target.headers) as session,
        session.get(url, proxy=target.proxy, headers=headers, params=params) as answer,
    ):
        if answer.status != 200:
            _, reason = fault(read_json(await answer.read()))
            raise NoEvents(f"{url} answered {answer.status}: {reason or 'check the address'}")
        if answer.content_type != "text/event-stream":
            raise NoEvents(f"{url} is not a stream of events. Check the address")
        events = Events()
        yield ((events.name, data) async for received in answer.content.iter_any() for data in events.cut(received))


class EventRecorder:
    """Copies steps line by line, in its own thread; each line names its run."""

    def __init__(self, target: Target, file: TextIO) -> None:
        self._target = target
        self._file = file
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._labels: str | None = None
        self._received = 0
        self.connected = False

    def start(self) -> None:
        """Start to connect, without waiting: some servers answer only with their first event."""
        self._thread.start()

    def is_connected(self) -> bool:
        """Return whether the server has events; meaningful only after its first step."""
        self._ready.wait(CONNECT_SECONDS)
        return self.connected

    def label(self, run: Mapping[str, Any] | None) -> None:
        """Set the run to which the next steps belong; None discards them."""
        self._labels = None if run is None else json.dumps(run)[1:-1]

    def settle(self) -> None:
        """Wait until no events arrive for a moment: they may arrive after the answers they belong to."""
        seen, end = -1, time.monotonic() + MAX_SETTLE_SECONDS
        while self.connected and seen < self._received and time.monotonic() < end:
            seen = self._received
            time.sleep(QUIET_SECONDS)
        self._file.flush()

    def close(self) -> None:
        """Stop copying."""
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(10)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError, NoEvents):
            asyncio.run(self._follow())
        self._ready.set()

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        async with watch(self._target) as events:
            self.connected = True
            self._ready.set()
            async for _, data in events:
                self._write(data)

    def _write(self, data: bytes) -> None:
        self._received += 1
        if self._labels is not None and b'"members"' in data and data.startswith(b"{"):
            self._file.write("{" + self._labels + ", " + data.decode("utf-8", "replace")[1:] + "\n")

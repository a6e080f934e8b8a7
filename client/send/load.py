"""Sending: each request is sent at its time, independently of the others, from one event loop in one thread.

Thousands may be open. The loop measures how late requests are sent and how long it stalled, so that a stalled client is
not mistaken for a slow server. This module must not know how requests were drawn (`workloads`), what their numbers mean
(`measure`), or what the command line looks like (`client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from ..data import Planned
from ..report.measure import Outcome
from .dialects import Message, Unreadable, status_failure
from .reading import Reading, failure
from .sse import Events
from .target import CANNOT_CONNECT, CONNECT_SECONDS, Target

HEARTBEAT_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Counts:
    """The progress of a run."""

    total: int
    sent: int
    done: int
    failed: int
    tokens: int
    seconds: float

    @property
    def running(self) -> int:
        """The number of open requests."""
        return self.sent - self.done - self.failed


class Failed(Exception):
    """A request got no complete answer; the arguments are the kind of failure and its detail."""


def raise_for(outcome: Outcome, target: Target) -> None:
    """Raise ServerUnreachable, KeyRefused or Failed for a failed request."""
    if outcome.error == CANNOT_CONNECT:
        raise target.unreachable()
    if outcome.error.startswith("HTTP 401"):
        raise target.key_refused()
    if outcome.error:
        raise Failed(outcome.error, outcome.detail)


def send_all(target: Target, trace: Sequence[Planned], **options: Any) -> list[Outcome]:
    """Send requests one after the other and return their outcomes; `options` are those of LoadRun."""
    run = LoadRun(replace(target, connect_timeout=CONNECT_SECONDS), trace, users=1, **options)
    run.start()
    try:
        run.wait()
    finally:
        run.close()
    return run.outcomes()


class LoadRun:
    """One run of a trace against a server: start it, wait for it, then read the outcomes.

    With `users` the loop is closed: each of that many users sends its next request `think` seconds after the answer,
    and the times of the trace are ignored. A request that waits for others, as a turn of a conversation or a call of a
    program does, is sent when these are answered and its tool is done. A program of which a call failed sends no more.
    `on_outcome` is called for each outcome and `on_text` for each piece of a streamed text, both in the sending thread.
    `fields` are added to each request.
    """

    def __init__(
        self,
        target: Target,
        trace: Sequence[Planned],
        users: int | None = None,
        think: float = 0.0,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        on_text: Callable[[str], None] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._target = target
        self._trace = trace
        self._firsts = sorted((p for p in trace if p.is_first), key=lambda planned: planned.due)
        self._following: dict[int, list[Planned]] = {}
        for planned in trace:
            for parent in planned.call.after if planned.call else ():
                self._following.setdefault(parent, []).append(planned)
        self._missing = {p.index: len(p.call.after) for p in trace if p.call}  # answers that a call waits for
        self._ended: set[str] = set()  # programs of which a call failed
        self._said: dict[int, list[Message]] = {}  # each conversation that others may go on with
        self._mark = secrets.token_hex(3)  # of the run in the names of its programs, which the server would go on with
        self._users = users
        self._think = think
        self._on_outcome = on_outcome
        self._on_text = on_text
        self._fields = fields or {}
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Planned, float]] = {}
        self._outcomes: list[Outcome] = []
        self._sent = self._done = self._tokens = 0
        self._requests: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.stalls: list[float] = []
        self._ready = threading.Event()
        self._finished = threading.Event()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._schedule: asyncio.Task[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._start = time.perf_counter()

    def start(self) -> None:
        """Start the loop, then the clock, then the schedule."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Stop sending."""
        self._call(self._stopping.set)
        if self._schedule is not None:
            self._call(self._schedule.cancel)

    def close(self) -> None:
        """Cancel the open requests."""
        if self._main is not None:
            self._call(self._main.cancel)
        if self._thread.is_alive():
            self._thread.join(5)

    def _call(self, act: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(act)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all sent requests have ended; return False after the timeout."""
        over = self._finished.wait(seconds)
        if self._broken is not None:
            raise self._broken
        return over

    def now(self) -> float:
        """Return seconds since the start."""
        return time.perf_counter() - self._start

    def counts(self) -> Counts:
        """Return the progress so far."""
        with self._lock:
            failed = len(self._outcomes) - self._done
            return Counts(len(self._trace), self._sent, self._done, failed, self._tokens, self.now())

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all sent requests; open requests count as failed."""
        now = self.now()
        with self._lock:
            cut = [
                Outcome(planned.index, planned.num_tokens, at, at, now, 0, "cut off", program=planned.program)
                for planned, at in self._running.values()
            ]
            return [*self._outcomes, *cut]

    def _run(self) -> None:
        # A full garbage collection would delay sends by 100 ms and more.
        usual = gc.get_threshold()
        gc.set_threshold(usual[0], usual[1], 1_000_000)
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._broken = error
        finally:
            gc.set_threshold(*usual)
            self._ready.set()
            self._finished.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._target.connect_timeout, sock_read=self._target.timeout
        )
        # A connection for each request, as in the original. If connections were kept, the server could close one just
        # before a request, and only the first request on each would include the time to connect.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._target.headers,
            cookie_jar=aiohttp.DummyCookieJar(), proxy=self._target.proxy,
        ) as session:  # fmt: skip
            send = self._closed(session) if self._users else self._open(session)
            self._schedule = asyncio.create_task(send)
            heart = asyncio.create_task(self._beat())
            self._start = time.perf_counter()
            self._ready.set()
            await asyncio.wait([self._schedule])
            while self._requests:
                await asyncio.wait(self._requests)
            heart.cancel()
            if not self._schedule.cancelled():
                self._schedule.result()

    async def _open(self, session: aiohttp.ClientSession) -> None:
        for planned in self._firsts:
            if (wait := planned.due - self.now()) > 0:
                await asyncio.sleep(wait)
            self._begin(session, planned, planned.due)

    async def _closed(self, session: aiohttp.ClientSession) -> None:
        free = asyncio.Semaphore(self._users or 1)

        async def leave(task: asyncio.Task[None]) -> None:
            await asyncio.wait([task])
            await self._pause(self._think)
            free.release()

        for planned in self._firsts:
            await free.acquire()
            task = self._begin(session, planned, self.now())
            self._keep(asyncio.create_task(leave(task)))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return task

    def _begin(self, session: aiohttp.ClientSession, planned: Planned, intended: float) -> asyncio.Task[None]:
        self._count(planned, intended)
        return self._keep(asyncio.create_task(self._converse(session, planned, intended)))

    def _count(self, planned: Planned, intended: float) -> None:
        with self._lock:
            self._running[planned.index] = planned, intended
            self._sent += 1

    async def _converse(self, session: aiohttp.ClientSession, planned: Planned, intended: float) -> None:
        """Send a request, and then those that waited for its answer alone, or for it last."""
        on = planned.call.on if planned.call else None
        before = [] if on is None else self._said[on]
        outcome = await self._ask(session, planned, intended, before)
        if outcome.error:
            self._ended.add(planned.program)
            return
        following = self._following.get(planned.index, [])
        if following and planned.chat:
            said = [{"role": "user", "content": planned.prompt}, {"role": "assistant", "content": outcome.completion}]
            self._said[planned.index] = [*before, *said]
        for call in following:
            self._missing[call.index] -= 1
        await asyncio.gather(*(self._later(session, call) for call in following if not self._missing[call.index]))

    async def _later(self, session: aiohttp.ClientSession, planned: Planned) -> None:
        """Send a request when its tool is done or its user has thought, unless the run or its program has ended."""
        wait = (planned.call.tool_s if planned.call else 0.0) + (0.0 if planned.program else self._think)
        at = self.now() + wait
        await self._pause(wait)
        if self._stopping.is_set() or (planned.program and planned.program in self._ended):
            return
        self._count(planned, at)
        await self._converse(session, planned, at)

    async def _pause(self, seconds: float) -> None:
        """Wait for a tool or a user, but not beyond the end of a stopped run."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _beat(self) -> None:
        """Record how much longer than requested the loop slept: in that time it sent and read nothing."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.stalls.append(time.perf_counter() - before - HEARTBEAT_SECONDS)

    async def _ask(
        self, session: aiohttp.ClientSession, planned: Planned, intended: float, before: Sequence[Message]
    ) -> Outcome:
        dialect = self._target.dialect.of(planned)
        named = replace(planned, call=planned.call.within(self._mark)) if planned.call else planned
        body = json.dumps(dialect.body(named, before, **self._fields)).encode()
        reading = Reading(planned, dialect, intended, self.now())
        try:
            # A redirect would turn the POST into a GET and time two requests as one.
            async with session.post(
                self._target.url + dialect.path, data=body, allow_redirects=False,
                headers={"Content-Type": "application/json", **self._target.names(named)},
            ) as answer:  # fmt: skip
                # Some servers ignore the wish for a stream, and answer with all tokens at once.
                if answer.status == 200 and dialect.stream and answer.content_type != "application/json":
                    outcome = await self._follow(answer, reading)
                else:
                    outcome = await self._whole(answer, reading)
        except Exception as error:  # of any kind: this request failed, and the run goes on
            outcome = reading.outcome(self.now(), *failure(error))
        with self._lock:
            del self._running[planned.index]
            self._outcomes.append(outcome)
            self._done += not outcome.error
            self._tokens += outcome.tokens
        self._on_outcome(outcome)
        return outcome

    async def _whole(self, answer: aiohttp.ClientResponse, reading: Reading) -> Outcome:
        payload = await answer.read()
        now = self.now()
        try:
            content = json.loads(payload)
        except (ValueError, RecursionError):
            content = payload[:60]
        if answer.status != 200:
            return reading.outcome(now, *status_failure(answer.status, content))
        reading.answer = reading.dialect.read(content, answer.headers, reading.planned)
        return reading.outcome(now)

    async def _follow(self, answer: aiohttp.ClientResponse, reading: Reading) -> Outcome:
        events, shown, heard = Events(), 0, self.now()
        reading.answer.id = answer.headers.get("X-Request-Id", "")
        try:
            async for received in answer.content.iter_any():
                heard = self.now()
                reading.read(events.cut(received), heard)
                if self._on_text is not None:
                    self._on_text(reading.answer.text[shown:])
                    shown = len(reading.answer.text)
        except (aiohttp.ClientError, OSError):
            if not reading.answer.ended:
                raise
            return reading.outcome(max(reading.last, reading.sent), *reading.missing())
        with contextlib.suppress(Unreadable):  # half an event, where the stream was cut
            reading.read(events.end(), heard)
        return reading.outcome(heard, *reading.missing())  # a server may close the connection long afterwards

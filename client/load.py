"""Sending: the open loop that lets each request leave at its time, whatever the others do.

One thread keeps the schedule and hands each request to a waiting thread, so that neither a slow
server nor the drawing of the progress can delay a send. It must not know how the requests were
drawn (`data`), what their numbers mean (`measure`), or how the command line looks (`client`).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import requests

if __package__:
    from .data import Planned
    from .measure import Outcome
else:
    from data import Planned
    from measure import Outcome

CONNECT_SECONDS = 5.0
STATS_SECONDS = 10.0
# Threads held ready before an open-loop run; more are started when all of them wait for answers.
READY_THREADS = 64
STACK_BYTES = 512 * 1024
DETAIL_CHARACTERS = 200
CANNOT_CONNECT = "cannot connect"


class ServerUnreachable(Exception):
    """Nothing that speaks HTTP answers at the address."""


class KeyRefused(Exception):
    """The server wants an API key, or another one."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load and how to ask it."""

    url: str
    timeout: float = 600.0
    # Long enough for a SYN dropped by a full backlog to be sent again a few times.
    connect_timeout: float = 30.0
    api_key: str | None = field(default=None, repr=False)

    def session(self) -> requests.Session:
        """Open a session for one thread."""
        session = requests.Session()
        # Proxies are read once: per request that costs time, and a .netrc would replace our key.
        session.proxies = requests.utils.get_environ_proxies(self.url)
        session.trust_env = False
        # As the original did. A kept connection that the server closes meanwhile would fail a
        # request, and only the first request of each thread would pay for the connect.
        session.headers["Connection"] = "close"
        if self.api_key:
            session.headers["Authorization"] = f"Bearer {self.api_key}"
        return session


@dataclass(frozen=True, slots=True)
class Counts:
    """How far a run is."""

    total: int
    sent: int
    done: int
    failed: int
    tokens: int
    seconds: float

    @property
    def running(self) -> int:
        """Count the requests on their way."""
        return self.sent - self.done - self.failed


def fetch_stats(target: Target) -> dict[str, Any] | None:
    """Fetch the server's `/stats`; None when something answers but gives no statistics.

    Raises `ServerUnreachable` when nothing answers and `KeyRefused` on 401.
    """
    with target.session() as session:
        try:
            answer = session.get(f"{target.url}/stats", timeout=(CONNECT_SECONDS, STATS_SECONDS))
            body = answer.json() if answer.status_code == 200 else None
        except (requests.ReadTimeout, requests.JSONDecodeError, RecursionError):
            return None
        except (requests.RequestException, OSError, ValueError) as error:
            raise ServerUnreachable(str(error)) from error
    if answer.status_code == 401:
        raise KeyRefused
    return body if isinstance(body, dict) else None


def ask(
    session: requests.Session,
    target: Target,
    planned: Planned,
    now: Callable[[], float],
    **extra: int,
) -> tuple[Outcome, dict[str, Any]]:
    """Send one request and tell what became of it, with the answer; never raise.

    `now` gives the seconds since the start of the run; `extra` are further fields of the request.
    """
    body = {"prompt": planned.prompt, "num_tokens": planned.num_tokens, **extra}
    facts = {"index": planned.index, "asked_tokens": planned.num_tokens, "intended": planned.at}
    sent = now()
    try:
        # A redirect would turn the POST into a GET and time two requests as one.
        answer = session.post(
            f"{target.url}/inference",
            json=body,
            timeout=(target.connect_timeout, target.timeout),
            allow_redirects=False,
        )
    except Exception as error:
        # Also what is no RequestException: urllib3's own escape now and then. Whatever it is,
        # this request failed and the run goes on.
        kind, detail = _failure(error)
        return Outcome(**facts, sent=sent, ended=now(), error=kind, detail=detail), {}
    ended = now()
    error, detail, content = _read(answer)
    tokens = content.get("num_tokens")
    if type(tokens) is not int or tokens < 0:
        # The original's server does not tell; it always generates what was asked.
        tokens = planned.num_tokens
    return Outcome(
        **facts,
        sent=sent,
        ended=ended,
        tokens=0 if error else tokens,
        error=error,
        detail=detail,
        completion="" if error else content["completion"],
    ), content


def _read(answer: requests.Response) -> tuple[str, str, dict[str, Any]]:
    """Split an answer into failure kind ("" when complete), detail and the JSON object."""
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        content = {}
    if answer.status_code != 200:
        fault = content.get("error")
        fault = fault if isinstance(fault, dict) else {"message": fault}
        kind = f"HTTP {answer.status_code}"
        if isinstance(fault.get("type"), str):
            kind += f" ({fault['type'][:40]})"
        return kind, str(fault.get("message") or "")[:DETAIL_CHARACTERS], content
    if not isinstance(content.get("completion"), str):
        return "unreadable answer", f"200 without a completion: {answer.text[:60]!r}", content
    return "", "", content


def _failure(error: Exception) -> tuple[str, str]:
    if isinstance(error, requests.ConnectTimeout):
        return CANNOT_CONNECT, "no answer to the connect"
    if isinstance(error, requests.Timeout):
        return "timeout", "no answer in time; --timeout allows more"
    if isinstance(error, requests.ConnectionError) and "NewConnectionError" in repr(error):
        return CANNOT_CONNECT, "no connection to the server"
    if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
        return "connection broken", "the server closed it before the answer was complete"
    return "unreadable answer", f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]


class LoadRun:
    """One run of a trace against a server; start it, wait for it, then take the outcomes."""

    def __init__(self, target: Target, trace: Sequence[Planned]) -> None:
        self._target = target
        self._trace = trace
        self._jobs: SimpleQueue[Planned | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._ready = threading.Semaphore(0)
        self._workers = 0
        self._lock = threading.Lock()
        self._running: dict[int, Planned] = {}
        self._outcomes: list[Outcome] = []
        self._sent = self._done = self._tokens = 0
        self._all_sent = False
        self._stop = threading.Event()
        self._finished = threading.Event()
        self._start = time.perf_counter()

    def start(self) -> None:
        """Start the threads, then the clock, then the schedule."""
        at_once = sum(1 for planned in self._trace if planned.at == 0)
        ready = min(len(self._trace), max(READY_THREADS, at_once))
        with _small_stacks():
            while self._workers < ready and self._add_worker():
                pass
        # Only when all of them wait for work does the clock start.
        for _ in range(self._workers):
            self._ready.acquire()
        self._idle.release(self._workers)
        self._start = time.perf_counter()
        threading.Thread(target=self._schedule, name="schedule", daemon=True).start()

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until every request that was sent has ended; False when time is up first."""
        return self._finished.wait(seconds)

    def now(self) -> float:
        """Give the seconds since the start."""
        return time.perf_counter() - self._start

    def counts(self) -> Counts:
        """Count what was sent and what came of it so far."""
        with self._lock:
            failed = len(self._outcomes) - self._done
            return Counts(
                len(self._trace), self._sent, self._done, failed, self._tokens, self.now()
            )

    def outcomes(self) -> list[Outcome]:
        """Give an outcome for every request sent; those without an answer yet have failed."""
        now = self.now()
        with self._lock:
            cut = [
                Outcome(
                    planned.index, planned.num_tokens, planned.at, planned.at, now, 0, "cut off"
                )
                for planned in self._running.values()
            ]
            return [*self._outcomes, *cut]

    def _schedule(self) -> None:
        with _small_stacks():
            for planned in self._trace:
                if self._stop.wait(max(0.0, planned.at - self.now())):
                    break
                with self._lock:
                    self._running[planned.index] = planned
                    self._sent += 1
                if not self._idle.acquire(blocking=False):
                    self._add_worker()
                self._jobs.put(planned)
        with self._lock:
            self._all_sent = True
            self._finish_if_over()

    def _add_worker(self) -> bool:
        """Start one more thread; False when the machine allows none (the request then waits).

        Raises `RuntimeError` when it does not even allow the first.
        """
        try:
            threading.Thread(target=self._work, name="request", daemon=True).start()
        except RuntimeError:
            if not self._workers:
                raise
            return False
        self._workers += 1
        return True

    def _work(self) -> None:
        with self._target.session() as session:
            self._ready.release()
            while (planned := self._jobs.get()) is not None:
                outcome, _ = ask(session, self._target, planned, self.now)
                with self._lock:
                    del self._running[planned.index]
                    self._outcomes.append(outcome)
                    self._done += not outcome.error
                    self._tokens += outcome.tokens
                    self._finish_if_over()
                self._idle.release()

    def _finish_if_over(self) -> None:
        if self._all_sent and not self._running and not self._finished.is_set():
            self._finished.set()
            for _ in range(self._workers):
                self._jobs.put(None)


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    """Let threads started meanwhile have small stacks: thousands of them must fit in memory."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)

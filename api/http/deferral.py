"""Requests that hold no thread while they wait for their tokens.

A handler that has started a job returns a `Deferred`: the job, and what makes the response once the job has ended.
Under the project's gunicorn worker the handler's thread then goes on to another request, and one thread, the
`Completer`, makes and sends the responses of all jobs that end. So a step that ends 64 requests wakes one thread, not
64 that compete for the interpreter. Elsewhere (Flask's test client, another WSGI server) the handler waits for its job.
It must not know what a dialect's answers look like, nor what they are written to.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from flask import Flask, Response, request

from serving.inference import CHECK_SECONDS

log = logging.getLogger(__name__)
DEFERS = "effective_batching.defers"  # in the WSGI environment of a server that takes a Deferred


class Work(Protocol):
    """Work that must end before the response can be made."""

    @property
    def ticket(self) -> Ticket | None: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def own_limit(self) -> float | None: ...
    @property
    def ends_at(self) -> float: ...
    def end_if_late(self, now: float) -> bool: ...
    def end_if_lost(self) -> None: ...


class Deferred(NamedTuple):
    """A running job, and the function that makes the response after it has ended."""

    job: Work
    complete: Callable[[], Response]


class App(Flask):
    """A Flask app whose handlers may return a `Deferred`, and are not coroutines."""

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: a check for coroutines on each call costs more than most hooks."""
        return func

    def dispatch_request(self) -> Any:
        answer = super().dispatch_request()
        if isinstance(answer, Deferred) and DEFERS not in request.environ:
            return answer.complete()
        return answer


class Exchange:
    """One request and its response, in two halves; between them it holds no thread.

    Flask keeps the state of a request in context variables, so both halves run in one `contextvars.Context`.
    """

    def __init__(self, app: App, environ: dict[str, Any], start_response: Any) -> None:
        self._app = app
        self._environ = environ
        environ[DEFERS] = True
        self._start_response = start_response
        self._context = contextvars.Context()
        self._flask: Any = None
        self._result: Any = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the context of this request."""
        return self._context.run(function, *args)

    def begin(self) -> Work | None:
        """Call the handler; return the job that must end before `answer` is called, if any."""
        app = self._app
        self._flask = app.request_context(self._environ)
        self._flask.push()
        self._result = self._guarded(self._dispatch)
        return self._result.job if isinstance(self._result, Deferred) else None

    def answer(self) -> Iterable[bytes]:
        """Make the response, and return the part to send."""
        if isinstance(self._result, Deferred):
            self._result = self._guarded(self._result.complete)
        response = self._app.finalize_request(self._result)
        return response(self._environ, self._start_response)

    def end(self) -> None:
        """Leave the request's context, whatever its outcome."""
        if self._flask is not None:
            self._flask.pop(None)

    def _dispatch(self) -> Any:
        refusal = self._app.preprocess_request()
        return self._app.dispatch_request() if refusal is None else refusal

    def _guarded(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, or the response of the app's error handlers."""
        try:
            return make()
        except Exception as error:
            return self._app.handle_user_exception(error)


class Ticket:
    """A job with a waiter; `ring` is called in any thread when an inference of the job ends."""

    __slots__ = ("_over", "job", "resume")

    def __init__(self, over: queue.SimpleQueue[Ticket]) -> None:
        self._over = over
        self.job: Work | None = None
        self.resume: Callable[[], None] | None = None

    def notify(self) -> None:
        if self.resume is not None:
            self._over.put(self)


class Completer:
    """One thread that resumes requests whose jobs have ended, one after the other; `resume` must not block.

    It also ends jobs that are late or that the loop has lost.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._over: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[Ticket] = set()
        self._impatient: set[Ticket] = set()  # those that end before the server's own limit
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once. A server does so before its first request, while it can still have a thread."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="completer", daemon=True)
                thread.start()
                self._thread = thread

    def ticket(self) -> Ticket:
        """Return a ticket whose `ring` the inferences of a job call when they end."""
        return Ticket(self._over)

    def wait(self, job: Work, resume: Callable[[], None]) -> None:
        """Call `resume` in this object's thread when the job has ended."""
        ticket = job.ticket
        assert ticket is not None
        ticket.job = job
        self.start()
        with self._lock:
            self._waiting.add(ticket)
            if job.own_limit is not None:
                self._impatient.add(ticket)
        ticket.resume = resume  # from here on it rings
        if job.is_over or job.own_limit is not None:
            self._over.put(ticket)

    def _run(self) -> None:
        look_at = self._clock() + CHECK_SECONDS
        while True:
            with self._lock:
                own = min((t.job.ends_at for t in self._impatient if t.job), default=look_at)
            try:
                self._complete(self._over.get(timeout=max(0.0, min(look_at, own) - self._clock())))
                while not self._over.empty():
                    self._complete(self._over.get())
            except queue.Empty:
                pass
            now = self._clock()
            with self._lock:
                late = list(self._waiting if now >= look_at else self._impatient)
            if now >= min(look_at, own):
                self._look(late, now)
            if now >= look_at:
                look_at = now + CHECK_SECONDS

    def _complete(self, ticket: Ticket) -> None:
        """Resume the waiter of a job that has ended; a second call for the same job does nothing."""
        job, resume = ticket.job, ticket.resume
        if job is None or resume is None or not job.is_over:
            return
        ticket.resume = None
        with self._lock:
            self._waiting.discard(ticket)
            self._impatient.discard(ticket)
        try:
            resume()
        except Exception:
            log.exception("cannot complete a response")

    def _look(self, tickets: list[Ticket], now: float) -> None:
        """End jobs that are late or that the loop has lost; their tickets ring."""
        for ticket in tickets:
            job = ticket.job
            try:
                if job is not None and not job.end_if_late(now):
                    job.end_if_lost()
            except Exception:  # this thread must go on for the others
                log.exception("a job could not be looked after")

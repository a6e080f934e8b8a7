"""Requests that hold no thread while they wait for their tokens.

A handler that has started its work returns a `Deferred`: the work, and a function that makes the response once the work
has ended. Under the project's gunicorn worker the handler's thread then serves another request, and one thread, the
`Completer`, makes and sends the responses of all work that ends. So a step that ends 64 requests wakes one thread, not
64 that compete for the interpreter. Elsewhere (Flask's test client, another WSGI server) the handler waits for its work.
This module must not know what a dialect's answers look like, nor what they are written to.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from flask import Flask, Response, request

from serving.inference import CHECK_SECONDS
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)
T = TypeVar("T")
DEFERS = "effective_batching.defers"  # in the WSGI environment of a server that supports Deferred


class Work(Protocol):
    """Work that must end before the response can be made."""

    @property
    def part_ended(self) -> Wakeup: ...  # which its parts notify when they end
    @property
    def is_over(self) -> bool: ...
    @property
    def own_limit(self) -> float | None: ...
    @property
    def ends_at(self) -> float: ...
    def end_if_late(self, now: float) -> bool: ...
    def end_if_lost(self) -> None: ...


class Deferred(NamedTuple):
    """Running work, and the function that makes the response after it has ended."""

    work: Work
    complete: Callable[[], Response]


class App(Flask):
    """A Flask app whose handlers may return a `Deferred`, and must not be coroutines."""

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: checking for coroutines on each call costs more than most hooks."""
        return func

    def dispatch_request(self) -> Any:
        answer = super().dispatch_request()
        if isinstance(answer, Deferred) and DEFERS not in request.environ:
            return answer.complete()
        return answer


class DeferredRequest:
    """A request and its response, in two halves between which it holds no thread: `begin` and `answer`.

    Flask keeps the state of a request in context variables, so both halves run in one `contextvars.Context`. Each half
    leaves the request's context if it fails, and the second half always does.
    """

    def __init__(self, app: App, environ: dict[str, Any], start_response: Any) -> None:
        self._app = app
        self._environ = environ
        environ[DEFERS] = True
        self._start_response = start_response
        self._context = contextvars.Context()
        self._flask: Any = None
        self._result: Any = None

    def begin(self) -> Work | None:
        """Call the handler; return the work that must end before `answer` is called, if any."""
        return self._context.run(self._begin)

    def answer(self, send: Callable[[Iterable[bytes]], T]) -> T:
        """Make the response, and return what `send` returns for its body, which it closes."""
        return self._context.run(self._answer, send)

    def _begin(self) -> Work | None:
        self._flask = self._app.request_context(self._environ)
        self._flask.push()
        try:
            self._result = self._guarded(self._dispatch)
        except BaseException:
            self._flask.pop(None)
            raise
        return self._result.work if isinstance(self._result, Deferred) else None

    def _answer(self, send: Callable[[Iterable[bytes]], T]) -> T:
        try:
            if isinstance(self._result, Deferred):
                self._result = self._guarded(self._result.complete)
            pieces = self._app.finalize_request(self._result)(self._environ, self._start_response)
            return send(pieces)
        finally:
            self._flask.pop(None)

    def _dispatch(self) -> Any:
        early_answer = self._app.preprocess_request()
        return self._app.dispatch_request() if early_answer is None else early_answer

    def _guarded(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, or the response of the app's error handlers."""
        try:
            return make()
        except Exception as error:
            return self._app.handle_user_exception(error)


class Completer:
    """A thread that resumes requests whose work has ended, one after the other; `resume` must not block.

    It also ends work that is late or that the loop has lost.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._over: queue.SimpleQueue[Work] = queue.SimpleQueue()  # work of which a part has ended
        self._lock = threading.Lock()
        self._waiting: dict[Work, Callable[[], None]] = {}  # and what resumes its request
        self._impatient: set[Work] = set()  # work that ends before the server's limit
        self._thread = threading.Thread(target=self._run, name="completer", daemon=True)

    def start(self) -> None:
        """Start the thread, once. A server does so before its first request, while a thread is still available."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def wait(self, work: Work, resume: Callable[[], None]) -> None:
        """Call `resume` in this object's thread when the work has ended."""
        self.start()
        with self._lock:
            self._waiting[work] = resume
            if work.own_limit is not None:
                self._impatient.add(work)
        work.part_ended.resume = partial(self._over.put, work)
        if work.is_over or work.own_limit is not None:
            self._over.put(work)

    def _run(self) -> None:
        check_at = self._clock() + CHECK_SECONDS
        while True:
            with self._lock:
                own = min((work.ends_at for work in self._impatient), default=check_at)
            try:
                self._complete(self._over.get(timeout=max(0.0, min(check_at, own) - self._clock())))
                while not self._over.empty():
                    self._complete(self._over.get())
            except queue.Empty:
                pass
            now = self._clock()
            with self._lock:
                late = list(self._waiting if now >= check_at else self._impatient)
            if now >= min(check_at, own):
                self._end_late_or_lost(late, now)
            if now >= check_at:
                check_at = now + CHECK_SECONDS

    def _complete(self, work: Work) -> None:
        """Resume the request of work that has ended; a second call does nothing."""
        if not work.is_over:
            return
        with self._lock:
            resume = self._waiting.pop(work, None)
            self._impatient.discard(work)
        if resume is None:
            return
        work.part_ended.resume = None  # a cycle, which would live until the next GC
        try:
            resume()
        except Exception:
            log.exception("cannot complete a response")

    def _end_late_or_lost(self, late: list[Work], now: float) -> None:
        """End work that is late or that the loop has lost, which notifies `part_ended`."""
        for work in late:
            try:
                if not work.end_if_late(now):
                    work.end_if_lost()
            except Exception:  # this thread must continue for the others
                log.exception("cannot end late work")

"""Requests that hold no thread while they wait: who resumes them, and that a request is whole in two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask import Response, g, request

from api.http.deferral import App, Completer, Deferred, DeferredRequest
from serving.wakeup import Wakeup
from tests.support import wait_until


class FakeJob:
    """A job that ends when it is told to; `own_limit` is when it wants to end by itself."""

    def __init__(self, own_limit: float | None = None) -> None:
        self.part_ended = Wakeup()
        self.own_limit = own_limit
        self.ends_at = own_limit or 1e9
        self.is_over = False
        self.looked = 0

    def end(self) -> None:
        self.is_over = True
        self.part_ended.notify()

    def end_if_late(self, now: float) -> bool:
        if now < self.ends_at:
            return False
        self.end()
        return True

    def end_if_lost(self) -> None:
        self.looked += 1


def test_a_job_is_resumed_once_when_it_ends() -> None:
    completer = Completer()
    job, resumed = FakeJob(), []
    completer.wait(job, lambda: resumed.append(threading.current_thread().name))
    job.part_ended.notify()  # one of several inferences has ended
    job.end()
    job.end()
    wait_until(lambda: resumed)
    last = FakeJob()
    completer.wait(last, lambda: resumed.append("last"))
    last.end()
    wait_until(lambda: "last" in resumed)
    assert resumed == ["completer", "last"]


def test_a_job_that_ended_before_anybody_waited_is_resumed() -> None:
    completer, done = Completer(), threading.Event()
    job = FakeJob()
    job.end()
    completer.wait(job, done.set)
    assert done.wait(60)


def test_a_job_ends_at_its_own_limit() -> None:
    now = [0.0]
    completer = Completer(clock=lambda: now[0])
    job, done = FakeJob(own_limit=0.01), threading.Event()
    completer.wait(job, done.set)
    assert not done.is_set()
    now[0] = 0.02
    job.part_ended.notify()
    assert done.wait(60)


def test_a_job_that_nobody_ends_is_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.http.deferral.CHECK_SECONDS", 0.01)
    completer = Completer()
    job = FakeJob()
    completer.wait(job, lambda: None)
    wait_until(lambda: job.looked > 2)
    job.end()


def test_an_answer_that_fails_harms_no_other() -> None:
    completer, done = Completer(), threading.Event()
    bad, good = FakeJob(), FakeJob()
    completer.wait(bad, lambda: 1 / 0)
    completer.wait(good, done.set)
    bad.end()
    good.end()
    assert done.wait(60)


def environ(path: str) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "GET", "PATH_INFO": path, "SERVER_NAME": "x", "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http",
    }  # fmt: skip


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def test_a_request_keeps_its_context_from_the_thread_that_began_it_to_the_one_that_answers() -> None:
    app, ended = App("test"), []
    job: Any = object()

    @app.get("/later")
    def later() -> Deferred:
        g.name = "mine"
        return Deferred(job, lambda: Response(f"{g.name} {request.path}"))

    @app.after_request
    def mark(response: Response) -> Response:
        response.headers["X-Marked"] = g.name
        return response

    app.teardown_request(lambda error: ended.append(g.name))
    started: list[Any] = []
    first, second = (DeferredRequest(app, environ("/later"), lambda *args: started.append(args)) for _ in range(2))
    assert in_a_thread(first.begin) is job
    assert in_a_thread(second.begin) is job
    assert ended == []
    assert in_a_thread(lambda: first.answer(b"".join)) == b"mine /later"
    assert dict(started[0][1])["X-Marked"] == "mine"
    assert ended == ["mine"]
    second.answer(b"".join)


def test_what_fails_in_the_second_half_is_answered_by_the_apps_error_handlers() -> None:
    app = App("test")
    app.register_error_handler(ZeroDivisionError, lambda error: Response("zero", 500))
    app.add_url_rule("/bad", view_func=lambda: Deferred(job, lambda: Response(str(1 / 0))))
    job: Any = object()
    exchange = DeferredRequest(app, environ("/bad"), lambda *args: None)
    assert exchange.begin() is job
    assert exchange.answer(b"".join) == b"zero"


def test_another_server_waits_for_the_job() -> None:
    app = App("test")
    job: Any = object()
    app.add_url_rule("/later", view_func=lambda: Deferred(job, lambda: Response("done")))
    assert app.test_client().get("/later").text == "done"

"""Deadlines and places: a late or refused request frees what it holds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from calls import engine_of, error, service
from flask import Flask

from app import create_app
from config import Config
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine, places_taken

Start = Callable[..., Flask]


@pytest.fixture
def small(model: FakeModel) -> Iterator[Start]:
    """Return what makes an app whose engine has one slot."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Flask:
            config = Config(policy="dynamic", max_batch_size=1, **options)
            engine = fake_engine(model, max_batch_size=1, max_queue=config.max_queue)
            stack.callback(engine.manager.stop)
            return create_app(config, engine)

        yield start


def ask(app: Flask, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": "hi", "num_tokens": 3} | fields
    return app.test_client().post("/inference", json=body, headers=headers)


@pytest.mark.parametrize("by_header", [False, True])
def test_who_waits_too_long_is_answered_504_and_never_computed(small: Start, model: FakeModel, by_header: bool) -> None:
    app = small(queue_timeout=60.0)
    headers = {"X-Queue-Timeout": "0.1"} if by_header else None
    refused = threading.Event()
    seen: set[int] = set()

    def hold(plan: Any) -> None:
        seen.update(len(seq.prompt_ids) for seq in plan.sequences)
        refused.wait(0.03)

    model.before = hold
    with in_background(lambda: ask(app, num_tokens=900)) as first:
        wait_until(lambda: model.plans)
        if not by_header:
            engine_of(app).manager.deadlines.queue_timeout = 0.1
        refusal = ask(app, headers, prompt="late")
        refused.set()
    told = error(refusal, 504)
    assert told["type"] == "timeout_error"
    assert "0.1 s" in told["message"]
    assert first[0].status_code == 200
    assert seen == {2}
    stats = app.test_client().get("/stats").get_json()
    counts = ("requests", "requests-timed-out", "requests-cancelled", "requests-failed")
    assert [stats[key] for key in counts] == [1, 1, 0, 0]


def test_a_request_may_ask_for_less_time_and_not_for_more(small: Start, model: FakeModel) -> None:
    model.before = lambda plan: time.sleep(0.03)
    app = small(request_timeout=0.3)
    for headers, fields, limit in (
        ({"X-Request-Timeout": "0.05"}, {}, "0.05 s"), ({"X-Request-Timeout": "1e9"}, {}, "0.3 s"),
        ({}, {"timeout_s": 1e300}, "0.3 s"),
    ):  # fmt: skip
        refusal = error(ask(app, headers, num_tokens=900, **fields), 504)
        assert refusal["type"] == "timeout_error"
        assert limit in refusal["message"]
    for bad in ("0", "-1", "nan", "inf", "soon", ""):
        reply = ask(app, {"X-Request-Timeout": bad})
        assert error(reply)["param"] == "X-Request-Timeout"
    wait_until(lambda: places_taken(app) == 0)  # when the step that had its inference has ended
    model.before = lambda plan: None
    wait_until(lambda: ask(app).status_code == 200)  # a slow machine may be late again


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_full_server_refuses_before_it_reads_and_says_when_to_come(
    small: Start, model: FakeModel, status: str
) -> None:
    app = small(max_queue=1, overload_status=status)
    encoded = lambda: engine_of(app).tokenizer.encoded  # type: ignore[attr-defined]  # noqa: E731
    assert ask(app, num_tokens=9).status_code == 200
    model.gate.clear()
    with in_background(lambda: ask(app)) as first, in_background(lambda: ask(app)) as second:
        wait_until(lambda: (places_taken(app), encoded()) == (2, 3))
        for path, body in (("/inference", b"{bad"), ("/generate", b""), ("/v1/completions", b"")):
            reply = app.test_client().post(path, data=body)
            assert reply.status_code == int(status)
            assert 1 <= int(reply.headers["Retry-After"]) <= 60
            assert "2 requests queued or running" in reply.text
        assert encoded() == 3
        assert app.test_client().get("/stats").status_code == 200
        model.gate.set()
    assert [r.status_code for r in first + second] == [200, 200]
    assert places_taken(app) == 0


def test_a_handler_that_fails_leaves_nothing_running(
    small: Start, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = small()
    engine = engine_of(app)
    take_in = engine.manager.enqueue_all

    def fail(inferences: Any) -> None:
        take_in(inferences)
        raise KeyError("lost")

    monkeypatch.setattr(engine.manager, "enqueue_all", fail)
    model.before = lambda plan: time.sleep(0.005)
    assert ask(app, num_tokens=900).status_code == 500
    wait_until(lambda: service(app).registry.open == 0)
    wait_until(lambda: (places_taken(app), engine.manager.running) == (0, 0))


def test_the_time_to_come_again_is_that_of_the_queue(small: Start, model: FakeModel) -> None:
    app = small(max_queue=50)
    manager = engine_of(app).manager
    assert manager.inbox.retry_after() == 1
    for _ in range(100):
        manager.inbox.rate.add(tokens=50, seconds=1.0)
    for queued, seconds in ((0, 1), (50, 1), (51, 2), (1000, 20), (10**9, 60)):
        manager.inbox.queued_tokens = queued
        assert manager.inbox.retry_after() == seconds
    manager.inbox.queued_tokens = 0

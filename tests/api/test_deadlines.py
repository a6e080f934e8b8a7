"""Deadlines and places: a late or refused request frees what it holds."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from calls import engine_of, service
from flask import Flask

from app import connect, create_app
from config import Config
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel, fake_engine, places_taken


def small(model: FakeModel, max_batch_size: int = 1, **options: Any) -> Flask:
    """Return an app whose engine has few slots."""
    app = create_app(Config(policy="dynamic", max_batch_size=max_batch_size, **options))
    queue = service(app).config.max_queue
    engine = fake_engine(model, max_batch_size=max_batch_size, max_queue=queue)
    connect(service(app), engine)
    return app


def stop(app: Flask) -> None:
    engine_of(app).manager.stop()


def ask(app: Flask, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": "hi", "num_tokens": 3} | fields
    return app.test_client().post("/inference", json=body, headers=headers)


@pytest.mark.parametrize("by_header", [False, True])
def test_who_waits_too_long_is_answered_504_and_never_computed(model: FakeModel, by_header: bool) -> None:
    app = small(model, queue_timeout=60.0)
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
            service(app).engine.manager.deadlines.queue_timeout = 0.1  # type: ignore[union-attr]
        refusal = ask(app, headers, prompt="late")
        refused.set()
    assert refusal.status_code == 504
    error = refusal.get_json()["error"]
    assert error["type"] == "timeout_error"
    assert "0.1 s" in error["message"]
    assert first[0].status_code == 200
    assert seen == {2}
    stats = app.test_client().get("/stats").get_json()
    counts = ("requests", "requests-timed-out", "requests-cancelled", "requests-failed")
    assert [stats[key] for key in counts] == [1, 1, 0, 0]
    stop(app)


def test_a_request_may_ask_for_less_time_and_not_for_more(model: FakeModel) -> None:
    model.before = lambda plan: time.sleep(0.03)
    app = small(model, request_timeout=0.3)
    for seconds, limit in (("0.05", "0.05 s"), ("1e9", "0.3 s")):
        reply = ask(app, {"X-Request-Timeout": seconds}, num_tokens=900)
        assert reply.status_code == 504
        assert limit in reply.get_json()["error"]["message"]
    for bad in ("0", "-1", "nan", "inf", "soon", ""):
        reply = ask(app, {"X-Request-Timeout": bad})
        assert reply.status_code == 400
        assert reply.get_json()["error"]["param"] == "X-Request-Timeout"
    wait_until(lambda: places_taken(app) == 0)  # when the step that had its inference has ended
    stop(app)


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_full_server_refuses_before_it_reads_and_says_when_to_come(model: FakeModel, status: str) -> None:
    go = threading.Event()
    app = small(model, max_queue=1, overload_status=status)
    assert ask(app, num_tokens=9).status_code == 200
    model.before = lambda plan: go.wait(60) and None  # type: ignore[func-returns-value]
    with in_background(lambda: ask(app)) as first, in_background(lambda: ask(app)) as second:
        wait_until(lambda: places_taken(app) == 2)
        wait_until(lambda: service(app).engine.tokenizer.encoded == 3)  # type: ignore[union-attr]
        for path, body in (("/inference", b"{bad"), ("/generate", b""), ("/v1/completions", b"")):
            reply = app.test_client().post(path, data=body)
            assert reply.status_code == int(status)
            assert 1 <= int(reply.headers["Retry-After"]) <= 60
        assert service(app).engine.tokenizer.encoded == 3  # type: ignore[union-attr]
        assert app.test_client().get("/stats").status_code == 200
        go.set()
    assert [r.status_code for r in first + second] == [200, 200]
    assert places_taken(app) == 0
    stop(app)


@pytest.mark.parametrize(
    "body", [b"", b"{bad", b'{"prompt": 5}', b'{"prompt": "x", "num_tokens": 9999}', b"x" * (1 << 20 | 1)]
)
def test_who_is_refused_gives_its_place_back(model: FakeModel, body: bytes) -> None:
    app = small(model)
    for path in ("/inference", "/v1/completions", "/generate", "/generate_stream", "/"):
        app.test_client().post(path, data=body, content_type="application/json").close()
    assert (places_taken(app), service(app).registry.open) == (0, 0)
    stop(app)


def test_a_handler_that_fails_leaves_nothing_running(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    app = small(model)
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
    stop(app)


def test_a_stream_that_is_never_read_gives_everything_back(model: FakeModel) -> None:
    app = small(model)
    model.before = lambda plan: time.sleep(0.005)
    reply = ask(app, num_tokens=900, stream=True)
    assert places_taken(app) == 1
    reply.close()
    engine = engine_of(app)
    wait_until(lambda: service(app).registry.open == 0)
    wait_until(lambda: (places_taken(app), engine.manager.running) == (0, 0))
    stop(app)


def test_the_time_to_come_again_is_that_of_the_queue(model: FakeModel) -> None:
    app = small(model, max_queue=50)
    manager = service(app).engine.manager  # type: ignore[union-attr]
    assert manager.inbox.retry_after() == 1
    for _ in range(100):
        manager.inbox.rate.add(tokens=50, seconds=1.0)
    for queued, seconds in ((0, 1), (50, 1), (51, 2), (1000, 20), (10**9, 60)):
        manager.inbox.queued_tokens = queued
        assert manager.inbox.retry_after() == seconds
    manager.inbox.queued_tokens = 0
    stop(app)

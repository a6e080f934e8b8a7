"""A server in trouble: full, loading, failing, late or dead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calls import ask, engine_of, error, service
from flask import Flask
from flask.testing import FlaskClient

from api.dialects import native
from api.service import STALL_SECONDS
from app import create_app, start
from config import Config
from serving.text_watch import TEXT_SECONDS, TextWatch
from tests.support import in_background, wait_until
from tests.support.fakes import FakeModel


def test_a_failing_step_answers_500_and_the_loop_goes_on(model: FakeModel, app: Flask, client: FlaskClient) -> None:
    def fail(plan: Any) -> None:
        if plan.number:  # the engine itself is sound: a token of nobody's comes
            raise RuntimeError("tensor at /srv/x.py is broken")

    model.before = fail
    refusal = error(ask(client), 500)
    assert refusal["type"] == "server_error"
    assert "RuntimeError" in refusal["message"]
    model.before = lambda plan: None
    assert ask(client).get_json()["completion"] == "hiabc"
    assert client.get("/health").status_code == 200
    stats = client.get("/stats").get_json()
    assert (stats["requests"], stats["requests-failed"]) == (1, 1)


def test_a_server_that_loads_says_so_and_still_has_stats() -> None:
    client = create_app(Config(policy="static")).test_client()
    refusal = error(ask(client), 503)
    assert refusal["type"] == "unavailable_error"
    assert "loading" in refusal["message"]
    health = client.get("/health")
    assert health.status_code == 503
    assert health.headers["Retry-After"] == "1"
    assert health.get_json() == {
        "status": "loading", "policy": "static", "reason": "the model is loading",
        "last_iteration_age_s": None,
    }  # fmt: skip
    assert client.get("/health/live").get_json() == {"status": "ok"}
    stats = client.get("/stats").get_json()
    assert (stats["engine"], stats["policy"], stats["requests-waiting"]) == (None, "static", 0)
    assert client.get("/stats/token_data.csv").data == b""


def test_a_model_that_cannot_be_loaded_is_said_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(Config(model=str(tmp_path)))
    failed: list[bool] = []
    thread = start(app, on_failure=lambda error: failed.append(True))
    assert start(app) is thread
    thread.join()
    assert failed == [True]
    health = app.test_client().get("/health")
    assert (health.status_code, health.get_json()["status"]) == (503, "dead")
    assert "has no config.json" in health.get_json()["reason"]
    error(ask(app.test_client()), 503)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_died_is_told(model: FakeModel, app: Flask, client: FlaskClient) -> None:
    def die(plan: Any) -> None:
        raise SystemExit

    model.before = die
    assert error(ask(client), 503)["type"] == "unavailable_error"
    assert error(ask(client), 503)["type"] == "unavailable_error"
    assert client.get("/health").get_json()["status"] == "dead"


def test_a_loop_that_hangs_is_told(app: Flask, client: FlaskClient, model: FakeModel) -> None:
    model.gate.clear()
    with in_background(lambda: ask(client)):
        wait_until(lambda: model.plans)
        engine_of(app).manager.inbox.heartbeat -= STALL_SECONDS + 1
        assert client.get("/health").get_json()["status"] == "stalled"
        assert "for 30" in error(ask(client), 503)["message"]
        model.gate.set()
    assert client.get("/health").status_code == 200


def test_a_tokenizer_that_hangs_is_told(app: Flask, client: FlaskClient) -> None:
    engine = engine_of(app)
    watch = service(app).texts = TextWatch(lambda: "a call", engine.manager)
    watch.seconds = 2 * TEXT_SECONDS
    assert client.get("/health").get_json()["status"] == "stalled"
    assert error(ask(client), 503)["type"] == "unavailable_error"
    watch.seconds = 0.0
    assert client.get("/health").status_code == 200


def test_a_handler_that_fails_answers_without_its_secrets(
    app: Flask, client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("/srv/secret.py")

    monkeypatch.setattr(native, "ending", fail)
    refusal = error(ask(client), 500)
    assert refusal["type"] == "server_error"

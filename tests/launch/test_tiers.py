"""What clients see when something breaks: one's own error, memory, a doubt, an engine that is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from api.service import Service
from app import connect, create_app
from config import Config
from scheduling.iteration import Plan
from tests.support import SOON, wait_until
from tests.support.fakes import FakeModel, fake_engine
from tests.support.faults import Faults

DIALECTS = {
    "/inference": lambda prompt, n: {"prompt": prompt, "num_tokens": n},
    "/v1/completions": lambda prompt, n: {"prompt": prompt, "max_tokens": n},
    "/generate": lambda prompt, n: {"inputs": prompt, "parameters": {"max_new_tokens": n}},
}


@pytest.mark.parametrize("path", DIALECTS)
def test_what_breaks_for_one_is_its_own_error_and_a_dead_engine_that_of_all(
    app: Flask, client: FlaskClient, model: FakeModel, path: str
) -> None:
    tgi = path == "/generate"

    def before(plan: Plan) -> None:
        for seq in plan.sequences:
            if error := {b"large": MemoryError(), b"deadly": SystemError("NULL")}.get(bytes(seq.prompt_ids)):
                raise error

    def kind(prompt: str, status: int) -> Any:
        reply = ask(app, path, prompt)
        assert reply.status_code == status
        assert status != 503 or int(reply.headers["Retry-After"]) >= 1
        body = reply.get_json()
        return body.get("error_type") or body["error"]["type"]

    model.before = before
    engine = app.extensions["service"].engine
    armed = Faults(bad_detokenize={"prompt_contains": "garbled"})
    object.__setattr__(engine, "make_inference", armed.maker(engine.make_inference))
    assert kind("large", 503) == "out_of_memory"
    assert kind("garbled", 424 if tgi else 500)
    assert ask(app, path).status_code == 200
    for prompt in ("deadly", "hi"):  # who was in it, and who comes later
        assert kind(prompt, 503) == ("healthcheck" if tgi else "unavailable_error")
        assert "only a new process" in ask(app, path).get_data(as_text=True)
    for route in ("/health", "/ready"):
        state = client.get(route)
        assert (state.status_code, state.get_json()["status"]) == (503, "dead")
        assert "only a new process" in state.get_json()["reason"]
    assert client.get("/health/live").status_code == 200
    object.__setattr__(engine, "stall_seconds", 2.0)
    assert app.extensions["service"].stall_seconds == 2.0  # a shorter limit for a loop that hangs can be set


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    app = create_app(Config(policy="dynamic", max_batch_size=4, max_queue=8))
    service: Service = app.extensions["service"]
    connect(service, fake_engine(model, max_batch_size=4, max_queue=8))
    yield app
    service.stop()


def ask(app: Flask, path: str, prompt: str = "hi", n: int = 3) -> Any:
    return app.test_client().post(path, json=DIALECTS[path](prompt, n))


def test_after_a_failed_step_the_server_is_ready_when_a_token_has_been_computed(
    app: Flask, client: FlaskClient, model: FakeModel
) -> None:
    asked, go = threading.Event(), threading.Event()

    def before(plan: Plan) -> None:
        if plan.number == 0:
            asked.set()
            assert go.wait(SOON)
        elif any(bytes(seq.prompt_ids) == b"bad" for seq in plan.sequences):
            raise RuntimeError("poisoned")

    model.before = before
    with ThreadPoolExecutor(1) as pool:
        bad = pool.submit(ask, app, "/inference", "bad")
        assert asked.wait(SOON)
        doubt = client.get("/ready")
        assert (doubt.status_code, doubt.get_json()["status"]) == (503, "recovering")
        assert client.get("/health").status_code == 200
        go.set()
        assert bad.result().status_code == 500
    wait_until(lambda: client.get("/ready").status_code == 200)
    faults = client.get("/stats").get_json()["engine"]["faults"]
    assert faults == {"steps_failed": 1, "steps_retried": 1, "out_of_memory": 0, "deaths": 0}


def test_slots_that_memory_does_not_hold_are_told_with_what_to_set(
    app: Flask, client: FlaskClient, model: FakeModel
) -> None:
    assert "slot_cap" not in client.get("/health").get_json()
    manager = app.extensions["service"].engine.manager

    def before(plan: Plan) -> None:
        if plan.number == 1:
            wait_until(lambda: manager.waiting + manager.running == 4)
        if len(plan.sequences) > 2:
            raise RuntimeError("CUDA out of memory")

    model.before = before
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda i: ask(app, "/inference", f"r{i}", 9), range(4)))
    assert {reply.status_code for reply in replies} == {200}
    state = client.get("/health").get_json()
    assert (state["status"], state["slot_cap"]) == ("ok", 2)
    assert "--max-batch-size 2" in state["advice"]
    assert client.get("/stats").get_json()["engine"]["slot_cap"] == 2
    assert "eb_slot_cap 2.0" in client.get("/metrics").get_data(as_text=True)

"""The demonstration needs nothing from elsewhere."""

from __future__ import annotations

import pytest

import app
import config as settings
from launch.engine import load_engine
from tests.support import wait_until


def test_its_load_begins_with_the_engine_and_asks_no_one_for_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.text.ranks.from_tiktoken", lambda timeout_s: pytest.fail("it asked for a download"))
    chosen = settings.load(["--demo", "on"], {}).config
    flask_app = app.create_app(chosen)
    service, engine = flask_app.extensions["service"], load_engine(chosen)
    app.connect(service, engine)
    app.begin_demo(service, engine)
    reply = flask_app.test_client().get("/load").get_json()
    flask_app.test_client().delete("/load")
    engine.manager.stop()
    assert (reply["active"], reply["params"]["users"], engine.manager.slots) == (True, 16, 8)


def test_it_goes_back_to_its_own_policy_and_load_after_a_tour_that_was_killed() -> None:
    chosen = settings.load(["--demo", "on", "--model", "mock:distserve-opt13b@50"], {}).config
    engine = load_engine(chosen)
    flask_app = app.create_app(chosen, engine)
    client = flask_app.test_client()
    app.begin_demo(flask_app.extensions["service"], engine)
    client.put("/policy", json={"policy": "static"})
    lapsed = {"users": 4, "pause": 0.0, "max_tokens": 8, "lease": 0.01, "replace": True}
    assert client.post("/load", json=lapsed).status_code == 200
    wait_until(lambda: engine.manager.policy_name == "dynamic")
    wait_until(lambda: client.get("/load").get_json()["params"]["users"] == 16)
    client.delete("/load")
    engine.manager.stop()

"""The demonstration needs nothing from elsewhere."""

from __future__ import annotations

import pytest

import app
import config as settings
from launch.engine import load_engine


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
    assert (reply["active"], reply["params"]["users"], engine.slots) == (True, 16, 8)

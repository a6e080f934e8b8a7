"""The demonstration: how it is asked for, and that it needs nothing from elsewhere."""

from __future__ import annotations

import pytest

import app
import config as settings
from launch.engine import load_engine


@pytest.mark.parametrize(
    "argv", [["demo"], ["--demo"], ["dynamic", "--demo"], ["--demo", "dynamic"], ["--demo", "on", "--port", "9000"]]
)
def test_it_is_asked_for_by_a_word_or_a_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    app.main([*argv, "--print-config"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["--demo"].split()[0] == "on"
    assert lines["--model"].split() == [settings.DEMO["model"], "demo"]


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

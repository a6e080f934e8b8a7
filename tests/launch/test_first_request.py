"""A server computes its first steps before the first request, and shows them nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from api.service import Service
from app import connect, create_app, load_engine
from config import Config
from generate.runner import ModelRunner
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from tests.support.checkpoints import write_checkpoint

Loaded = tuple[FlaskClient, Service, list[str]]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """Return a server without requests, and the phases that it has computed."""
    phases: list[str] = []
    forward = ModelRunner.forward

    def note(runner: ModelRunner, plan: Plan) -> list[Output]:
        phases.extend("prefill" if s.is_prefilling else "decode" for s in plan.sequences)
        return forward(runner, plan)

    monkeypatch.setattr(ModelRunner, "forward", note)
    model = str(write_checkpoint(tmp_path))
    app = create_app(Config(policy="dynamic", model=model, compute_threads=1, kv_memory=64 << 20))
    service: Service = app.extensions["service"]
    engine = load_engine(service.config)
    connect(service, engine)
    yield app.test_client(), service, phases
    engine.manager.stop()


def test_a_prompt_and_tokens_are_computed_before_the_server_is_ready_and_not_counted(loaded: Loaded) -> None:
    client, service, phases = loaded
    assert client.get("/ready").status_code == 200
    assert phases[:2] == ["prefill", "decode"]
    assert len(phases) < 5
    lines = client.get("/metrics").text.splitlines()
    counters = [line.split() for line in lines if line.split("{")[0].split()[0].endswith("_total")]
    assert counters
    assert {value for name, value in counters if "http_requests" not in name} == {"0.0"}
    stats = client.get("/stats").get_json()
    engine = stats["engine"]
    assert stats["requests"] == stats["total-tokens-handled"] == engine["iterations"] == 0
    assert not any(engine["slot_steps"].values())
    kv = engine["kv"]
    assert kv["pages_used"] == kv["pages_cached"] == kv["query_tokens"] == 0
    assert not service.registry.open
    id = client.post("/inference", json={"prompt": "hi", "num_tokens": 2}).get_json()["id"]
    assert client.get(f"/requests/{id}").get_json()["iterations"] == [1, 2]
    assert client.get("/stats").get_json()["total-tokens-handled"] == 2


def test_the_warm_up_changes_no_text(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    client, service, _ = loaded
    body = {"prompt": "to be", "num_tokens": 20, "seed": 3}
    texts = [client.post("/inference", json=body).get_json()["completion"]]
    monkeypatch.setattr("launch.load_model.warm_up", lambda model: None)
    app = create_app(service.config)
    cold: Service = app.extensions["service"]
    connect(cold, load_engine(cold.config))
    texts.append(app.test_client().post("/inference", json=body).get_json()["completion"])
    cold.engine.manager.stop()
    assert texts[0] == texts[1]

"""A model whose files recommend sampling values: completions and chats use them where a request names none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from api.service import LoadedEngine, Service
from app import connect, create_app, load_engine
from batching import Inference
from config import Config
from launch import banner
from tests.support.checkpoints import write_checkpoint

COMPLETION, CHAT, NATIVE, TGI = "/v1/completions", "/v1/chat/completions", "/inference", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    NATIVE: {"prompt": "a", "num_tokens": 1},
    TGI: {"inputs": "a", "parameters": {"max_new_tokens": 1}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedEngine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("recommended"))
    values = '{"temperature": 0.25, "top_k": 3, "repetition_penalty": 1.5, "do_sample": true}'
    (folder / "generation_config.json").write_text(values)
    engine = load_engine(
        Config(policy="dynamic", model=str(folder), dtype="float32", compute_threads=1, kv_memory=1 << 20)
    )
    yield engine
    engine.manager.stop()


@pytest.fixture
def client(engine: LoadedEngine) -> FlaskClient:
    app = create_app(Config(access_log=False))
    service: Service = app.extensions["service"]
    connect(service, engine)
    return app.test_client()


@pytest.mark.parametrize(
    ("path", "named", "used"),
    [(COMPLETION, {}, (0.25, 3, 1.0, 1.5)), (CHAT, {}, (0.25, 3, 1.0, 1.5)),
     (CHAT, {"temperature": 1, "top_k": -1, "top_p": 0.5}, (1.0, 0, 0.5, 1.5)),
     (CHAT, {"temperature": None, "repetition_penalty": 1}, (0.25, 3, 1.0, 1.0)),
     (NATIVE, {}, (1.0, 0, 1.0, 1.0)), (TGI, {}, (0.0, 0, 1.0, 1.0))],
)  # fmt: skip
def test_a_request_is_sampled_as_it_says_then_as_the_model_recommends(
    client: FlaskClient, engine: LoadedEngine, path: str, named: dict[str, Any], used: tuple[float, ...]
) -> None:
    seen: list[Inference] = []
    engine.manager.listeners.append(seen.append)
    reply = client.post(path, json=BODIES[path] | named)
    engine.manager.listeners.remove(seen.append)
    assert reply.status_code == 200, reply.text
    sampling = seen[0].sequence.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == used


def test_the_banner_and_the_descriptions_say_what_applies(
    client: FlaskClient, engine: LoadedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.get("/info").get_json()["sampling_defaults"] == dict(engine.sampling)
    schemas = client.get("/openapi.json").get_json()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["temperature"]["default"] == 0.25
    assert schemas["CompletionRequest"]["properties"]["top_k"]["default"] == 3
    banner.show(Config(), engine, 1.0)
    assert "temperature 0.25, top_k 3, repetition_penalty 1.5" in capsys.readouterr().err

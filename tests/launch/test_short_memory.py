"""A model whose context is longer than memory holds is served with as much of it as fits, and says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from api.service import LoadedEngine, Service
from app import connect, create_app, load_engine
from config import Config
from launch import banner
from tests.support.checkpoints import write_checkpoint

PAGE = 64
GPT2_PAGE = 2 * 2 * 128 * 4 * PAGE  # keys and values, layers, width, bytes, tokens
LLAMA_PAGE = 2 * 2 * 16 * 4 * PAGE
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 100_000, "rms_norm_eps": 1e-5,
}  # fmt: skip


def llama(folder: Path) -> Path:
    """Return a Llama of random weights with the tokenizer of the small GPT-2, and a context of 100,000 tokens."""
    config = write_checkpoint(folder) / "config.json"
    config.write_text(json.dumps(LLAMA | {"vocab_size": json.loads(config.read_text())["vocab_size"]}))
    return folder


@pytest.fixture(params=["gpt2", "llama"])
def loaded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FlaskClient, LoadedEngine]]:
    """Serve a model with memory for three pages of 64 tokens."""
    folder = llama(tmp_path) if request.param == "llama" else write_checkpoint(tmp_path)
    page = LLAMA_PAGE if request.param == "llama" else GPT2_PAGE
    config = Config(
        policy="dynamic", model=str(folder), load_format="dummy", dtype="float32", compute_threads=1, kv_memory=3 * page
    )
    app = create_app(config)
    service: Service = app.extensions["service"]
    engine = load_engine(config)
    connect(service, engine)
    yield app.test_client(), engine
    engine.manager.stop()


def test_the_longest_context_that_fits_is_served(
    loaded: tuple[FlaskClient, LoadedEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    client, engine = loaded
    info = client.get("/info").get_json()
    assert (info["max_total_tokens"], info["kv_pages"]) == (3 * PAGE, 3)
    assert info["max_concurrent_sequences"] == {"24": 3, "48": 3, "96": 1, "192": 1}
    models = client.get("/v1/models").get_json()["data"]
    assert models[0]["max_model_len"] == 3 * PAGE
    body = {"prompt": [5] * 150, "max_tokens": 42, "temperature": 0, "ignore_eos": True}
    usage = client.post("/v1/completions", json=body).get_json()["usage"]
    assert usage["total_tokens"] == 3 * PAGE
    too_long = client.post("/v1/completions", json={**body, "max_tokens": 43})
    assert too_long.status_code == 400
    banner.show(Config(), engine, 1.0)
    shown = capfd.readouterr().err
    assert "context 192 of " in shown
    assert "--kv-memory to at least" in shown

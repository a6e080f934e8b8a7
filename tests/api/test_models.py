"""/v1/models, /version, /tokenize and /detokenize."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from calls import engine_of, error, service
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import EOT_ID

from app import create_app
from config import VERSION, Config
from tests.support.fakes import EOT


def test_the_served_model_is_listed(client: FlaskClient) -> None:
    listed = client.get("/v1/models").get_json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert card == client.get("/v1/models/fake").get_json()
    assert (card["id"], card["object"], card["root"], card["parent"]) == ("fake", "model", "fake", None)
    assert card["max_model_len"] == card["context_length"] == 1024
    assert card["meta"] == {"n_ctx": 1024, "n_ctx_train": 1024, "n_vocab": 257, "n_embd": 4}
    assert abs(card["created"] - time.time()) < 60


def test_the_version_is_told_before_the_model_is_there(client: FlaskClient) -> None:
    assert client.get("/version").get_json() == {"version": VERSION}
    loading = create_app(Config()).test_client()
    assert loading.get("/version").get_json() == {"version": VERSION}


TURNS = [{"role": "user", "content": "x"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1}, "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 16}, "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS}, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]},
    "/api/chat": {"messages": TURNS}, "/api/generate": {"prompt": "x"}, "/api/show": {},
}  # fmt: skip


def test_a_model_answers_to_its_further_names_in_every_dialect(app: Flask, client: FlaskClient) -> None:
    engine = engine_of(app)
    for others, listed, unknown in ((("claude-x", "qwen:8b"), ["claude-x", "qwen:8b"], 404), (("*",), [], 200)):
        service(app).engine = replace(engine, other_names=others)
        assert [card["id"] for card in client.get("/v1/models").get_json()["data"]] == ["fake", *listed]
        tags = client.get("/api/tags").get_json()["models"]
        assert [tag["model"].removesuffix(":latest") for tag in tags] == ["fake", *listed]
        for path, asked in ASKS.items():
            for name in ("fake", "claude-x", "qwen:8b"):
                assert client.post(path, json={"model": name, **asked}).status_code == 200, (path, name)
            assert client.post(path, json={"model": "gpt-5", **asked}).status_code == unknown
        assert client.get("/v1/models/claude-x").get_json()["id"] == "claude-x"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_another_model_is_not_found(client: FlaskClient, path: str) -> None:
    refusal = error(client.post(path, json={"model": "gpt-5", "prompt": "x", "tokens": [1]}), 404)
    assert (refusal["type"], refusal["param"], refusal["code"]) == ("not_found_error", "model", "model_not_found")
    assert "'fake'" in refusal["message"]
    assert error(client.get("/v1/models/no/such"), 404)["code"] == "model_not_found"


def test_text_becomes_ids_and_ids_text(client: FlaskClient) -> None:
    text = f"hé{EOT}"
    answer = client.post("/tokenize", json={"prompt": text}).get_json()
    assert answer == {"count": 4, "max_model_len": 1024, "tokens": [104, 0xC3, 0xA9, EOT_ID]}
    back = client.post("/detokenize", json={"tokens": answer["tokens"]}).get_json()
    assert back == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": ""}).get_json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).get_json() == {"prompt": ""}


def test_a_text_that_is_not_tokenized_since_another_is_is_named(client: FlaskClient) -> None:
    reply = client.post("/tokenize", json={"prompt": "a", "inputs": "bc", "odd": 1})
    assert reply.get_json()["tokens"] == [97]
    assert reply.headers["X-Ignored-Params"] == "odd, inputs"


def test_tgi_wants_the_place_of_each_token(client: FlaskClient) -> None:
    answer = client.post("/tokenize", json={"inputs": "hé"}).get_json()
    assert answer == [
        {"id": 104, "text": "h", "start": 0, "stop": 1},
        {"id": 0xC3, "text": "é", "start": 1, "stop": 2},
        {"id": 0xA9, "text": "é", "start": 1, "stop": 2},
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"prompt": None, "inputs": None}),
     ("/detokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [257]}),
     ("/detokenize", {"tokens": "x"}), ("/detokenize", {"tokens": [True]})],
)  # fmt: skip
def test_bad_tokens_are_refused(client: FlaskClient, path: str, body: dict[str, Any]) -> None:
    assert error(client.post(path, json=body))["param"] in ("prompt", "tokens")

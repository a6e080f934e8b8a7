"""Calls in OpenAI's dialect that several tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from support import FakeModel, fake_engine
from werkzeug.test import TestResponse

from api.service import Service
from app import connect, create_app
from config import Config

EOT_ID = 256
USER = {"role": "user", "content": "Hi"}


def served(model: FakeModel, tokenizer: Any = None) -> Iterator[Flask]:
    """Yield an app with room for 20 requests."""
    app = create_app(Config(policy="dynamic", max_batch_size=8, max_queue=12, access_log=False))
    service: Service = app.extensions["service"]
    engine = fake_engine(model, max_queue=12, tokenizer=tokenizer)
    connect(service, engine)
    yield app
    engine.manager.stop()


def ask(client: FlaskClient, **fields: Any) -> TestResponse:
    return client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3} | fields)


def done(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    reply = ask(client, **fields)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.get_json()
    return result


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def name_bytes(name: str) -> bytes:
    return bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode()


def stream(client: FlaskClient, **fields: Any) -> list[Any]:
    reply = ask(client, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    frames = [f.removeprefix("data: ") for f in reply.text.split("\n\n") if f.startswith("data: ")]
    return [f if f == "[DONE]" else json.loads(f) for f in frames]


def chat(client: FlaskClient, *messages: dict[str, Any], **fields: Any) -> TestResponse:
    return client.post("/v1/chat/completions", json={"messages": list(messages), "max_tokens": 4} | fields)

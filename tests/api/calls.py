"""Calls that the tests of the API share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from api.service import LoadedEngine, Service
from app import connect
from models.text.tokenizer import Tokenizer
from tests.support.fakes import FakeModel, FakeTokenizer

Tiny = tuple[FlaskClient, LoadedEngine]
PIECES = [b"abc", b"ca", "bé".encode(), b"b\xc3", b"\xa9a", b""]


class PieceTokenizer(FakeTokenizer):
    """Has, beside a token for each byte, some of several characters, of parts of them, and of none."""

    vocab_size = 257 + len(PIECES)

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token - 257] if token > 256 else super().token_bytes(token)


class Talk(NamedTuple):
    """A model with a chat template that says what it is told, and the prompts that it got."""

    client: FlaskClient
    model: FakeModel
    tokenizer: Tokenizer
    prompts: list[str]

    def says(self, text: str) -> None:
        self.model.says = [*self.tokenizer.encode(text), 2]


def service(app: Flask) -> Service:
    result: Service = app.extensions["service"]
    return result


def engine_of(app: Flask) -> LoadedEngine:
    found = service(app).engine
    assert found is not None
    return found


def connected(app: Flask, engine: LoadedEngine) -> Iterator[Flask]:
    """Yield the app in front of this engine, and stop the engine."""
    connect(service(app), engine)
    yield app
    engine.manager.stop()


def ask(client: FlaskClient, **fields: Any) -> TestResponse:
    return client.post("/inference", json={"prompt": "hi", "num_tokens": 3} | fields)


def raw(client: FlaskClient, body: bytes, **options: Any) -> TestResponse:
    return client.post("/inference", data=body, **options)


def error(response: TestResponse, status: int = 400) -> dict[str, Any]:
    """Return the error of a refusal after checking what every refusal promises."""
    assert response.status_code == status, response.text
    assert response.mimetype == "application/json"
    assert len(response.data) < 8192
    assert not any(word in response.text for word in ("Traceback", ".py", "site-packages"))
    body = response.get_json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) > 20
    if status in (429, 503):
        assert int(response.headers["Retry-After"]) >= 1
    result: dict[str, Any] = body["error"]
    return result


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)

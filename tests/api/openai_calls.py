"""Calls in OpenAI's dialect that several tests share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

if TYPE_CHECKING:
    import openai

EOT_ID = 256
USER = {"role": "user", "content": "Hi"}


def official_client(app: Flask, key: str = "any") -> openai.OpenAI:
    """Return OpenAI's own client of an app; loading it takes as long as all tests of a file take."""
    import httpx2
    import openai

    http = httpx2.Client(transport=httpx2.WSGITransport(app))
    return openai.OpenAI(base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http)


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

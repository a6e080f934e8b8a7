"""POST /v1/responses. The model is a fake, so its answers keep to the form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calls import connected, error
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import official_client
from pydantic import BaseModel
from werkzeug.test import TestResponse

from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import from_folder
from tests.support.fakes import FakeModel, fake_engine
from tests.support.tokenizers import TOOL_TEMPLATES, write

PARIS = '{"city": "Paris"}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "Tells.", "parameters": SCHEMA}
NOW = {"type": "function", "name": "now"}
TOOLS: list[Any] = [WEATHER, NOW]
CALLS = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": PARIS}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "rain"}
IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.fixture(params=["smollm2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    write(tmp_path, "smollm")
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATES[request.param])
    return Tokenizer(from_folder(tmp_path))


@pytest.fixture
def prompts(model: FakeModel, tokenizer: Tokenizer) -> list[str]:
    found: list[str] = []
    model.before = lambda plan: found.append(tokenizer.decode(plan.sequences[0].prompt_ids))
    return found


@pytest.fixture
def app(shared_app: Flask, model: FakeModel, tokenizer: Tokenizer) -> Iterator[Flask]:
    says(model, tokenizer, "Hello.")
    yield from connected(shared_app, fake_engine(model, tokenizer=tokenizer))


def says(model: FakeModel, tokenizer: Tokenizer, text: str) -> None:
    model.says = [*tokenizer.encode(text), 2]


def ask(client: FlaskClient, **fields: Any) -> TestResponse:
    return client.post("/v1/responses", json={"input": "Hi"} | fields)


def answer(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    reply = ask(client, **fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.get_json()
    return found


def events(client: FlaskClient, **fields: Any) -> list[dict[str, Any]]:
    reply = ask(client, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    found = []
    for frame in reply.text.strip().split("\n\n"):
        name, _, data = frame.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def plain(response: dict[str, Any]) -> list[Any]:
    """Return the output without ids."""
    texts = {"reasoning": lambda i: i["content"][0]["text"], "message": lambda i: i["content"][0]["text"]}
    return [
        (i["type"], i["status"], texts[i["type"]](i) if i["type"] in texts else (i["name"], i["arguments"]))
        for i in response["output"]
    ]


def test_it(client: FlaskClient, model: FakeModel, tokenizer: Tokenizer, app: Flask) -> None:
    print(json.dumps(answer(client), indent=1))
    for e in events(client, stream_interval=1):
        print(e)
    says(model, tokenizer, "Wait." + CALLS)
    print(plain(answer(client, tools=TOOLS)))
    for e in events(client, stream_interval=1, tools=TOOLS):
        print({k: v for k, v in e.items() if k != "response"})
    assert 0

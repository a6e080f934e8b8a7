"""What /inference refuses, and with which words: bodies, fields, and what exceeds the context."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from calls import ask, engine_of, error, raw
from flask import Flask
from flask.testing import FlaskClient

from api.schemas.fields import whole
from tests.support.fakes import FakeModel

BIG = 1 << 20

BAD_FIELDS: list[tuple[str, Any, str, str]] = [
    *(("num_tokens", value, "integer", "at least 1")
      for value in (True, False, 5.5, "x", "", "5.5", "1_0", [1], {"a": 1}, "1" * 40)),
    ("num_tokens", None, "is null", "at least 1"),
    *(("num_tokens", value, "greater than or equal to 1", "at least 1")
      for value in (0, -1, "0", "-7", 0.0, -(10**18))),
    *(("prompt", value, "valid string", "string")
      for value in (5, None, ["a"], {"a": 1}, True)),
    ("prompt", "", "at least 1 character", "string"),
    *(("temperature", value, "number", "from 0 (greedy) to 2") for value in ("1", True, [1])),
    *(("temperature", value, "equal to", "from 0 (greedy) to 2") for value in (-0.1, 2.1, 1e300)),
    ("temperature", 10**400, "number", "from 0 (greedy) to 2"),
    *(("top_p", value, "than", "above 0") for value in (0, -0.0, 1.01, -1)),
    *(("top_k", value, "than", "for all") for value in (-2, 2**31, 10**30)),
    *(("top_k", value, "integer", "for all") for value in (1.5, "5", True)),
    *(("seed", value, "than", "64-bit") for value in (2**63, -(2**63) - 1, 10**1000)),
    *(("seed", value, "integer", "64-bit") for value in (1.5, "7", True)),
    *(("stop", value, "", "at most 16") for value in ("", ["a"] * 17, "x" * 257, [1], {"a": 1}, [""], 5)),
    ("stop", "x" * 10_000, "256", "at most 16"),
    *(("ignore_eos", value, "boolean", "true or false") for value in ("true", 1, 0)),
    *(("timeout_s", value, "than 0", "above 0") for value in (0, -1)),
    ("timeout_s", "5", "number", "above 0"),
    ("priority", 1.5, "integer", "64-bit"),
    ("priority", 10**30, "than", "64-bit"),
    ("slo_s", 0, "greater than 0", "above 0"),
    ("user", 5, "string", "256"),
    ("user", "x" * 257, "256", "256"),
    *(("stream", value, "boolean", "true or false") for value in ("true", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "bound", "remedy"), BAD_FIELDS, ids=lambda v: repr(v)[:24])
def test_a_bad_field_is_refused_with_value_bound_and_remedy(
    client: FlaskClient, model: FakeModel, name: str, value: Any, bound: str, remedy: str
) -> None:
    refusal = error(ask(client, **{name: value}))
    assert refusal["type"] == "invalid_request_error"
    assert refusal["param"] == name
    message = refusal["message"]
    assert message.startswith(name)
    assert bound in message
    assert f"Send {'true' if name in ('ignore_eos', 'stream') else 'a'}" in message
    assert remedy in message
    inner = value[0] if isinstance(value, list) and len(value) == 1 else value
    assert any(form(whole(inner))[:20] in message for form in (json.dumps, repr, str))
    assert len(message) < 400
    assert model.plans == 0


def test_lone_surrogates_are_refused(client: FlaskClient, model: FakeModel) -> None:
    for body in (rb'{"prompt": "\ud800", "num_tokens": 1}', rb'{"prompt": "x", "num_tokens": 1, "stop": "\udfff"}'):
        error(raw(client, body))
    assert raw(client, rb'{"prompt": "\ud83d\ude00", "num_tokens": 1}').status_code == 200
    reply = raw(client, rb'{"prompt": "x", "num_tokens": 1, "\ud800": 1}')
    assert reply.headers["X-Ignored-Params"] == "?"
    assert model.plans == 2


def test_a_missing_prompt_beside_a_mistyped_one_suggests_it(client: FlaskClient) -> None:
    refusal = error(client.post("/inference", json={"promt": "x", "num_tokens": 1}))
    assert refusal["param"] == "prompt"
    assert "prompt is missing" in refusal["message"]
    assert "'promt'" in refusal["message"]
    assert "?" not in error(client.post("/inference", json={"num_tokens": 1}))["message"]


def test_everything_that_is_wrong_is_said_at_once(client: FlaskClient) -> None:
    message = error(ask(client, prompt="", num_tokens=0, top_p=2, top_k=-5, seed="x", stop="", user=1))["message"]
    assert message.count("Send ") == 5
    assert message.endswith("and 2 more")


def test_a_body_is_counted_while_it_is_read(client: FlaskClient, model: FakeModel) -> None:
    head = b'{"num_tokens": 1, "prompt": "'
    just_too_large = head + b"x" * (BIG + 1 - len(head) - 2) + b'"}'
    assert len(just_too_large) == BIG + 1
    for reply in (
        raw(client, just_too_large),
        client.post("/inference", input_stream=io.BytesIO(just_too_large),
                    environ_overrides={"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}),
        client.post("/inference", environ_overrides={"CONTENT_LENGTH": str(10 * BIG)}),
    ):  # fmt: skip
        assert "1,048,576 bytes" in error(reply, 413)["message"]
    assert "context" in error(raw(client, just_too_large[:-3] + b'"}'))["message"]
    assert model.plans == 0


def test_a_body_in_small_pieces_is_put_together(client: FlaskClient) -> None:
    class Trickle(io.BytesIO):
        rest = b'{"prompt": "x", "num_tokens": 1}'

        def read(self, size: int | None = -1) -> bytes:
            piece, self.rest = self.rest[:3], self.rest[3:]
            return piece

    reply = client.post("/inference", input_stream=Trickle(), environ_overrides={"wsgi.input_terminated": True})
    assert reply.get_json()["completion"] == "xa"


def test_a_prompt_and_its_answer_must_fit_the_context(client: FlaskClient, model: FakeModel) -> None:
    refusal = error(ask(client, prompt="x" * 1000, num_tokens=25))
    assert refusal["message"] == (
        "prompt has 1,000 tokens and num_tokens is 25; their sum must be at most 1,024. "
        "Shorten the prompt or request at most 24 tokens"
    )
    assert (refusal["param"], refusal["code"]) == ("num_tokens", "context_length_exceeded")
    assert model.plans == 0
    assert ask(client, prompt="x" * 1000, num_tokens=24).get_json()["num_tokens"] == 24


@pytest.mark.parametrize("length", [1024, 1025, 3000])
def test_a_prompt_that_fills_the_context_leaves_no_room(client: FlaskClient, length: int) -> None:
    refusal = error(ask(client, prompt="x" * length, num_tokens=1))
    assert f"{length:,} tokens" in refusal["message"]
    assert "1,024. Shorten the prompt to at most 1,023 tokens" in refusal["message"]
    assert (refusal["param"], refusal["code"]) == ("prompt", "context_length_exceeded")


def test_huge_numbers_of_tokens_are_refused(client: FlaskClient) -> None:
    for number in (1024, 10**9, 2**63, 10**4000):
        message = error(ask(client, num_tokens=number))["message"]
        assert ("at most 1,022 tokens" in message, len(message) < 400) == (True, True)


def test_what_cannot_fit_is_not_even_tokenized(app: Flask, client: FlaskClient) -> None:
    engine = engine_of(app)
    limit = engine.context * engine.tokenizer.longest_token
    refusal = error(ask(client, prompt="é" * (limit // 2 + 1)))
    assert f"{limit + 2:,} bytes" in refusal["message"]
    assert f"{limit:,}. Shorten the prompt" in refusal["message"]
    assert engine.tokenizer.encoded == 0  # type: ignore[attr-defined]


def test_the_prompt_that_an_error_proposes_leaves_room_for_the_answer(client: FlaskClient) -> None:
    refusal = error(ask(client, prompt="x" * 1024, num_tokens=25))
    assert "at most 999 tokens" in refusal["message"]
    assert ask(client, prompt="x" * 999, num_tokens=25).status_code == 200

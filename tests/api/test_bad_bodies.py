"""Bodies that are no request: every dialect refuses them alike, each in its own form, and computes nothing."""

from __future__ import annotations

import json

import pytest
from calls import service
from dialects import Dialect, body_of, every_dialect, refused
from flask import Flask
from flask.testing import FlaskClient

from tests.support.fakes import FakeModel, places_taken

ASKED = b'{"prompt": "x", "inputs": "x", "num_tokens": 1, "max_tokens": 1'
BAD_BODIES: dict[str, tuple[bytes, ...]] = {
    "empty": (b"", b"is empty", b"{"),
    "blank": (b" \n ", b"is empty", b"{"),
    "no JSON": (b"{bad", b"line 1, column 2", b"{"),
    "second line": (b'{"prompt": "x",\n  nope}', b"line 2, column 3"),
    "trailing text": (b'{"prompt": "x", "num_tokens": 1} x', b"Extra data", b"column 34"),
    "list": (b"[]", b"is []", b"must be a JSON object"),
    "null": (b"null", b"is null", b"must be a JSON object"),
    "string": (b'"x"', b"is 'x'", b"must be a JSON object"),
    "number": (b"5", b"is 5", b"must be a JSON object"),
    "true": (b"true", b"is true", b"must be a JSON object"),
    "twice": (ASKED + b', "prompt": "y"}', b"'prompt'", b"twice", b"once"),
    "twice inside": (ASKED + b', "z": {"a": 1, "a": 2}}', b"'a'", b"twice"),
    "5,000 digits": (ASKED + b', "z": ' + b"9" * 5000 + b"}", b"too long", b"shorter"),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, b"more than 32 levels", b"flat"),
    "deep objects": (b'{"a":' * 5000, b"more than 32 levels"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), b"UTF-8 at byte 0", b"UTF-8"),
    "Latin-1": ('{"prompt": "é"}'.encode("latin-1"), b"UTF-8 at byte 12"),
    "cut short": (b'{"prompt": "abc', b"Unterminated string"),
    "not finite": (ASKED + b', "z": NaN}', b"NaN", b"finite"),
    "too large a number": (ASKED + b', "z": {"1": -1e999}}', b"-1e999", b"finite"),
}


@every_dialect
def test_a_bad_body_is_refused(app: Flask, model: FakeModel, dialect: Dialect) -> None:
    client = app.test_client()
    for name, (body, *words) in BAD_BODIES.items():
        message = refused(client.post(dialect.posted, data=body, content_type="application/json"), dialect)
        assert all(word.decode() in message for word in words), (name, message)
    assert (model.plans, places_taken(app), service(app).registry.open) == (0, 0, 0)


@every_dialect
def test_without_a_prompt_it_is_asked_for(client: FlaskClient, model: FakeModel, dialect: Dialect) -> None:
    if dialect.path.startswith("/api/"):
        return  # where that loads the model
    message = refused(client.post(dialect.posted, json={}), dialect)
    assert "missing" in message
    assert model.plans == 0


@every_dialect
def test_a_byte_order_mark_is_read_over(client: FlaskClient, dialect: Dialect) -> None:
    sent = b"\xef\xbb\xbf" + json.dumps(body_of(dialect, limit=1)).encode()
    assert client.post(dialect.path, data=sent, content_type="application/json").status_code == 200


@every_dialect
def test_a_compressed_body_is_not_unpacked(client: FlaskClient, dialect: Dialect) -> None:
    for encoding in ("gzip", "br", "deflate, gzip"):
        sent = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        reply = client.post(dialect.posted, data=b"\x1f\x8b" + b"0" * 100, headers=sent)
        assert "Content-Encoding" in refused(reply, dialect, 415)
    plain = client.post(dialect.path, json=body_of(dialect, limit=1), headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@every_dialect
def test_a_body_that_is_too_large_is_refused(client: FlaskClient, dialect: Dialect) -> None:
    reply = client.post(dialect.path, data=b"x" * (1 << 21), content_type="application/json")
    assert "1,048,576 bytes" in refused(reply, dialect, 413)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("name", ["num_tokens", "temperature", "top_p", "timeout_s", "seed"])
def test_numbers_are_finite(client: FlaskClient, name: str, number: str) -> None:
    fields = {"prompt": '"x"', "num_tokens": "1"} | {name: number}
    sent = "{" + ", ".join(f'"{field}": {value}' for field, value in fields.items()) + "}"
    reply = client.post("/inference", data=sent)
    assert reply.status_code == 400
    assert number in reply.get_json()["error"]["message"]

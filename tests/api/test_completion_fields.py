"""/v1/completions: which fields are taken, ignored and refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from calls import error
from flask.testing import FlaskClient
from openai_calls import ask, done, texts

from tests.support.fakes import FakeModel


def test_unknown_fields_are_named_and_harmless_ones_are_not(client: FlaskClient) -> None:
    reply = ask(client, nonsense=1, suffix=None, priority=3, stream_options=None, best_of=1, store=True, dry_base=2)
    assert reply.status_code == 200
    assert reply.headers["X-Ignored-Params"] == "nonsense, store, dry_base, priority"  # `dynamic` does not go by it
    reply = ask(client, stream=True, stream_options={"include_usage": False, "odd": 1})
    assert reply.headers["X-Ignored-Params"] == "stream_options.odd"
    assert ask(client, stream_options={"include_usage": True}).headers["X-Ignored-Params"] == "stream_options"


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "x"), ("suffix", 0), ("response_format", {"type": "json"}),
     ("response_format", {"type": "text", "schema": {"type": "object"}})],
)  # fmt: skip
def test_a_field_of_openai_that_is_not_supported_is_refused(client: FlaskClient, name: str, value: Any) -> None:
    assert error(ask(client, **{name: value}))["param"] == name


def test_a_limit_of_minus_one_is_all_the_room_there_is(client: FlaskClient) -> None:
    usage = done(client, max_tokens=-1)["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (2, 1024)
    totals = [len(text) for text in texts(done(client, prompt=["a", "bcd"], max_tokens=-1))]
    assert totals == [1023, 1021]
    assert texts(done(client, max_tokens=-1, min_tokens=2, stop="c")) == ["ab"]


def test_sixteen_stops_are_taken(client: FlaskClient) -> None:
    choice = done(client, max_tokens=20, stop=[*"ZYXWVUTSRQPONML", "de"])["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("abc", "de")


BAD: list[tuple[str, Any, str]] = [
    *(("prompt", v, "prompt") for v in ([], {}, None, "", [""], ["a", 1], [1, "a"], [[]], [[1], "a"], 5, True,
                                        [True], [-1], [1.5], [10**20], ["x"] * 65, [[1]] * 65, [257], [1, 257], [1 << 40])),
    *(("max_tokens", v, "whole number") for v in (-2, "abc", 1.5, True, "5")),
    ("max_tokens", 1023, "at most 1,022"),
    ("max_tokens", 10**30, "at most 1,022"),
    *(("n", v, "1 to 16") for v in (0, -2, 17, 10**6, 10**18, "2", 1.5)),
    *(("logprobs", v, "0 to 5") for v in (-1, 6, 100, True)),
    *(("prompt_logprobs", v, "0 to 5") for v in (-1, 6, False, "1")),
    *(("presence_penalty", v, "-2 to 2") for v in (-2.1, 5, "1", True)),
    *(("repetition_penalty", v, "above 0") for v in (0, -1)),
    *(("min_p", v, "0 to 1") for v in (-0.1, 1.1)),
    *(("min_tokens", v, "max_tokens") for v in (-1, 4)),
    *(("stop", v, "at most 16") for v in (list("abcdefghijklmnopq"), [1], "", "x" * 257)),
    *(("stop_token_ids", v, "token") for v in ([-1], [257], [1.5], 5, [True])),
    *(("logit_bias", v, "-100") for v in ({"1": 101}, {"-1": 1}, {"a": 1}, {"1": "x"}, [1], {str(i): 1 for i in range(301)})),
    ("logit_bias", {"257": 1}, "0 to 256"),
    *(("echo", v, "without quotes") for v in (3, "true")),
    *(("stream", v, "without quotes") for v in ("yes", 1)),
    ("stream_options", 5, "include_usage"),
    ("truncate_prompt_tokens", 0, "at least 1"),
    ("stream_interval", 0, "1 to 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=lambda v: repr(v)[:24])
def test_a_bad_field_is_refused_before_anything_is_computed(
    client: FlaskClient, model: FakeModel, name: str, value: Any, words: str
) -> None:
    refusal = error(ask(client, **{name: value}))
    assert refusal["param"] == name
    assert refusal["type"] == "invalid_request_error"
    assert words in refusal["message"]
    assert len(refusal["message"]) < 500
    assert model.plans == 0


def test_fields_that_do_not_go_together_are_refused(client: FlaskClient) -> None:
    assert error(ask(client, prompt="x" * 1024))["code"] == "context_length_exceeded"


def test_a_huge_list_is_refused_quickly(client: FlaskClient) -> None:
    body = json.dumps({"prompt": ["x"] * 100_000})
    began = time.thread_time()
    error(client.post("/v1/completions", data=body, content_type="application/json"))
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_must_say_that_it_is_json(client: FlaskClient, kind: str | None) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = client.post(path, data=b'{"prompt": "x"}', content_type=kind)
        assert "curl: -H 'Content-Type: application/json'" in error(reply, 415)["message"]
    for good in ("application/json; charset=latin-1", "application/vnd.x+json"):
        reply = client.post("/v1/completions", data=b'{"prompt": "x"}', content_type=good)
        assert reply.status_code == 200

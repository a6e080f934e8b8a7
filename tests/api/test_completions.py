"""/v1/completions: prompts, choices, stops and ids."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from calls import error
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import EOT_ID, ask, done, stream, texts

from app import connect, create_app
from config import Config
from tests.support.fakes import EOT, FakeModel, places_taken


@pytest.fixture(scope="module")
def shared_app() -> Flask:
    return create_app(Config(policy="dynamic", max_batch_size=8, max_queue=8, access_log=False))


def test_a_completion_has_every_field(client: FlaskClient) -> None:
    answer = done(client)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert abs(answer["created"] - time.time()) < 60
    assert (answer["model"], answer["system_fingerprint"]) == ("fake", None)
    assert answer["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_sixteen_tokens_are_the_default(client: FlaskClient) -> None:
    for fields in ({}, {"max_tokens": None}):
        reply = client.post("/v1/completions", json={"prompt": "x"} | fields)
        assert reply.get_json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "echoes"),
    [
        ("hi", ["hi"]),
        (["a", "bc"], ["a", "bc"]),
        ([104, 105.0], ["hi"]),
        ([[97], [98, 99]], ["a", "bc"]),
        ([EOT_ID], [EOT]),
        (f"a{EOT}", [f"a{EOT}"]),
    ],
)
def test_a_prompt_comes_in_four_forms(client: FlaskClient, prompt: Any, echoes: list[str]) -> None:
    answer = done(client, prompt=prompt, echo=True)
    assert texts(answer) == [text + "abc" for text in echoes]
    assert [c["index"] for c in answer["choices"]] == list(range(len(echoes)))


def test_end_of_text_in_a_prompt_is_the_token_unless_the_server_says_no(client: FlaskClient, app: Flask) -> None:
    assert done(client, prompt=f"a{EOT}b")["usage"]["prompt_tokens"] == 3
    plain = create_app(Config(end_of_text="text", access_log=False))
    engine = app.extensions["service"].engine
    connect(plain.extensions["service"], dataclasses.replace(engine, special_end=False))
    answer = done(plain.test_client(), prompt=f"a{EOT}b")
    assert answer["usage"]["prompt_tokens"] == 2 + len(EOT)


def test_choices_are_numbered_by_prompt_and_the_prompt_counts_once(client: FlaskClient) -> None:
    answer = done(client, prompt=["a", "bcd"], n=3, echo=True)
    assert texts(answer) == ["aabc"] * 3 + ["bcdabc"] * 3
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 18


def test_a_list_takes_places_all_or_none(client: FlaskClient, app: Flask) -> None:
    refusal = error(ask(client, prompt=["x"] * 17), 429)
    assert "this one adds 16, limit 16" in refusal["message"]
    assert app.extensions["service"].engine.tokenizer.encoded == 0
    assert places_taken(app) == 0
    assert len(texts(done(client, prompt=["x"] * 4, n=4))) == 16


def test_stops_end_the_text_and_are_named(client: FlaskClient) -> None:
    choice = done(client, max_tokens=20, stop=["zz", "de"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "de")
    choice = done(client, max_tokens=20, stop="de", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "abcde"
    choice = done(client, max_tokens=20, stop_token_ids=[100])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", 100)
    assert texts(done(client, max_tokens=4, stop_token_ids=[98], min_tokens=3)) == ["abcd"]
    assert texts(done(client, stop="hi")) == ["abc"]  # the prompt has it


def test_end_of_text_ends_and_counts_but_is_not_shown(client: FlaskClient, model: FakeModel) -> None:
    model.says = [97, EOT_ID, 98]
    answer = done(client, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
    assert answer["usage"]["completion_tokens"] == 2
    assert choice["logprobs"]["tokens"] == ["a", EOT]
    assert choice["logprobs"]["text_offset"] == [2, 3]
    assert texts(done(client, ignore_eos=True)) == ["ab"]
    shown = done(client, ignore_eos=True, skip_special_tokens=False, logprobs=0)["choices"][0]
    assert shown["text"] == f"a{EOT}b"
    assert shown["logprobs"]["tokens"] == ["a", EOT, "b"]


def test_token_ids_come_back_if_they_are_asked_for(client: FlaskClient) -> None:
    choice = done(client, return_token_ids=True)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([104, 105], [97, 98, 99])
    chunks = stream(client, return_token_ids=True, max_tokens=9)[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [104, 105]
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == list(range(97, 106))


def test_a_prompt_may_be_cut_to_its_last_tokens(client: FlaskClient) -> None:
    answer = done(client, prompt="x" * 3000 + "end", truncate_prompt_tokens=3, echo=True)
    assert texts(answer) == ["endabc"]
    assert answer["usage"]["prompt_tokens"] == 3


def test_an_id_of_the_clients_own_is_in_the_answer_and_its_header(client: FlaskClient) -> None:
    reply = ask(client, request_id="my-id.1")
    assert reply.get_json()["id"] == "cmpl-my-id.1"
    assert reply.headers["X-Request-Id"] == "my-id.1"
    assert client.get("/requests/my-id.1").get_json()["state"] == "finished"
    reply = client.post("/v1/completions", json={"prompt": "x", "request_id": "b"}, headers={"X-Request-Id": "a"})
    assert reply.get_json()["id"] == "cmpl-a"
    error(ask(client, request_id="a b"))

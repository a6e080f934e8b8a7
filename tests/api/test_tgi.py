"""TGI's dialect: what /generate, /generate_stream, / and /info take, answer and refuse."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from calls import Tiny
from dialects import EVERY, refused
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app import create_app
from config import Config
from tests.support.fakes import EOT, FakeModel

EOT_ID = 256
(TGI,) = (dialect for dialect in EVERY if dialect.path == "/")


@pytest.fixture(scope="module")
def shared_app() -> Flask:
    return create_app(Config(policy="dynamic", max_batch_size=8, max_queue=8, access_log=False))


def ask(client: FlaskClient, path: str = "/generate", **parameters: Any) -> TestResponse:
    return client.post(path, json={"inputs": "hi", "parameters": {"max_new_tokens": 3} | parameters})


def done(client: FlaskClient, **parameters: Any) -> dict[str, Any]:
    reply = ask(client, **parameters)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.get_json()
    return result


def stream(client: FlaskClient, **parameters: Any) -> list[dict[str, Any]]:
    reply = ask(client, "/generate_stream", **parameters)
    assert reply.status_code == 200, reply.text
    frames = reply.text.strip().split("\n\n")
    assert all(frame.startswith("data:{") for frame in frames)  # no space, and no [DONE]
    return [json.loads(frame[5:]) for frame in frames]


def error(reply: TestResponse, status: int = 422) -> str:
    assert reply.get_json()["error_type"] == "validation"
    return refused(reply, TGI, status)


# ---------------------------------------------------------------- answers


def test_the_text_comes_alone_unless_details_are_wanted(client: FlaskClient) -> None:
    assert done(client) == {"generated_text": "abc"}
    details = done(client, details=True)["details"]
    assert details == {
        "finish_reason": "length", "generated_tokens": 3, "seed": None, "prefill": [],
        "tokens": [{"id": 97 + i, "text": "abc"[i], "logprob": -0.5, "special": False} for i in range(3)],
    }  # fmt: skip


def test_all_the_room_is_the_default(client: FlaskClient) -> None:
    reply = client.post("/generate", json={"inputs": "x" * 1000})
    assert len(reply.get_json()["generated_text"]) == 24


def test_the_prompt_is_scored_if_it_is_wanted(client: FlaskClient) -> None:
    prefill = done(client, decoder_input_details=True)["details"]["prefill"]
    assert prefill == [{"id": 104, "text": "h", "logprob": None}, {"id": 105, "text": "i", "logprob": -0.5}]


def test_alternatives_come_token_by_token(client: FlaskClient) -> None:
    details = done(client, details=True, top_n_tokens=2)["details"]
    assert len(details["top_tokens"]) == 3
    assert details["top_tokens"][0][0] == details["tokens"][0]
    assert len(details["top_tokens"][0]) == 2


def test_the_full_text_begins_with_the_prompt(client: FlaskClient) -> None:
    assert done(client, return_full_text=True)["generated_text"] == "hiabc"
    assert stream(client, return_full_text=True)[-1]["generated_text"] == "hiabc"


def test_a_stop_of_either_name_stays_in_the_text(client: FlaskClient) -> None:
    answer = done(client, max_new_tokens=20, details=True, stop_sequences=["zz", "cd"])
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("abcd", "stop_sequence")
    assert "".join(t["text"] for t in answer["details"]["tokens"]) == "abcd"


def test_end_of_text_is_a_special_token_and_no_text(client: FlaskClient, model: FakeModel) -> None:
    model.says = [97, EOT_ID]
    answer = done(client, details=True)
    assert answer["generated_text"] == "a"
    assert answer["details"]["finish_reason"] == "eos_token"
    last = {"id": EOT_ID, "text": EOT, "logprob": -0.5, "special": True}
    assert answer["details"]["tokens"][-1] == last
    assert stream(client)[-1]["token"] == last


def test_what_a_token_adds_joins_to_the_text(client: FlaskClient, model: FakeModel) -> None:
    model.says = list("é😀".encode())
    for n, want in ((6, "é😀"), (4, "é\ufffd")):
        tokens = done(client, details=True, max_new_tokens=n)["details"]["tokens"]
        assert "".join(t["text"] for t in tokens) == want
        assert tokens[0]["text"] == ""
        events = stream(client, max_new_tokens=n)
        assert "".join(e["token"]["text"] for e in events) == want
        assert [e["token"] for e in events] == tokens


def test_half_a_character_at_the_end_has_the_same_text_in_a_stream(client: FlaskClient, model: FakeModel) -> None:
    model.says = [0xC3, EOT_ID]
    model.before = lambda plan: time.sleep(0.003)  # so that the end comes alone
    tokens = done(client, details=True)["details"]["tokens"]
    assert [token["text"] for token in tokens] == ["\ufffd", EOT]
    assert [event["token"] for event in stream(client)] == tokens


def test_the_last_of_the_prompt_may_be_kept(client: FlaskClient, prompts: list[str]) -> None:
    body = {"inputs": "x" * 5000, "parameters": {"max_new_tokens": 1, "truncate": 4}}
    assert client.post("/generate", json=body).status_code == 200
    assert prompts == ["x" * 4]


@pytest.mark.parametrize(
    ("parameters", "is_drawn"),
    [(None, True), ({}, False), ({"do_sample": True}, True), ({"temperature": 0.5}, True), ({"top_k": 3}, True),
     ({"top_p": 0.5}, True), ({"typical_p": 0.5}, True), ({"repetition_penalty": 1.2}, False), ({"seed": 1}, False)],
    ids=repr,
)  # fmt: skip
def test_tokens_are_drawn_if_a_parameter_means_it(
    client: FlaskClient, drawn: list[dict[str, Any]], parameters: dict[str, Any] | None, is_drawn: bool
) -> None:
    body = {"inputs": "x" * 1022} | ({} if parameters is None else {"parameters": parameters})
    assert client.post("/generate", json=body).status_code == 200
    assert (drawn[0]["temperature"] > 0) == is_drawn


def test_the_seed_that_was_used_is_told(client: FlaskClient) -> None:
    biggest = 2**64 - 1
    assert done(client, do_sample=True, seed=biggest, details=True)["details"]["seed"] == biggest
    drawn = {done(client, do_sample=True, details=True)["details"]["seed"] for _ in range(3)}
    assert len(drawn) == 3
    assert all(isinstance(seed, int) for seed in drawn)
    assert done(client, seed=4, details=True)["details"]["seed"] is None


def test_the_headers_tell_times_in_milliseconds(client: FlaskClient) -> None:
    headers = ask(client).headers
    for name in ("compute-time", "total-time", "validation-time", "queue-time", "inference-time",
                 "time-per-token", "compute-characters", "prompt-tokens", "generated-tokens"):  # fmt: skip
        assert int(headers[f"x-{name}"]) >= 0
    assert (headers["x-compute-characters"], headers["x-generated-tokens"]) == ("2", "3")
    assert headers["x-compute-type"] == "cpu"


def test_a_stream_has_an_event_for_each_token(client: FlaskClient) -> None:
    events = stream(client, top_n_tokens=1)
    assert [e["index"] for e in events] == [1, 2, 3]
    assert all(e["generated_text"] is None and e["details"] is None for e in events[:-1])
    assert events[-1]["generated_text"] == "abc"
    assert events[-1]["details"] == {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 2}
    assert all(len(e["top_tokens"]) == 1 for e in events)
    assert "top_tokens" not in stream(client)[0]


def test_the_root_answers_a_list_or_a_stream_or_greets(client: FlaskClient) -> None:
    assert ask(client, "/").get_json() == [{"generated_text": "abc"}]
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 2}, "stream": True}
    reply = client.post("/", json=body)
    assert reply.mimetype == "text/event-stream"
    assert reply.text.count("data:{") == 2
    plain = client.post("/", data=json.dumps(body), content_type="text/plain")
    assert plain.mimetype == "text/event-stream"
    for other in (b"", b"{", b"[]", b'{"prompt": "x"}'):
        reply = client.post("/", data=other)
        assert (reply.status_code, reply.mimetype) == (200, "text/plain")


def test_end_of_text_in_a_prompt_is_the_token(client: FlaskClient, model: FakeModel) -> None:
    seen: list[list[int]] = []
    model.before = lambda plan: seen.append(plan.sequences[0].prompt_ids)
    client.post("/generate", json={"inputs": f"a{EOT}", "parameters": {"max_new_tokens": 1}})
    assert seen == [[97, EOT_ID]]


def test_info_says_how_much_is_taken(client: FlaskClient) -> None:
    info = client.get("/info").get_json()
    assert (info["model_id"], info["model_pipeline_tag"]) == ("fake", "text-generation")
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (1024, 1023)
    assert (info["max_concurrent_requests"], info["max_best_of"], info["max_stop_sequences"]) == (16, 1, 16)
    assert (info["policy"], info["max_batch_size"], info["device"]) == ("dynamic", 8, "cpu")


# ---------------------------------------------------------------- refusals

BAD: list[tuple[str, Any]] = [
    *(("temperature", v) for v in (0, -1, "1", True, -0.0)),
    *(("top_p", v) for v in (0, 1, 1.0, 1.5)),
    *(("typical_p", v) for v in (0, 1)),
    *(("top_k", v) for v in (0, -1, 1.5)),
    *(("repetition_penalty", v) for v in (0, -1)),
    *(("frequency_penalty", v) for v in (-3, 3)),
    *(("max_new_tokens", v) for v in (0, -1, "x", 10_000, 10**30)),
    *(("best_of", v) for v in (0, 2, 10**18)),
    *(("seed", v) for v in (-1, 2**64, 1.5)),
    *(("top_n_tokens", v) for v in (0, 6)),
    *(("stop", v) for v in ("x", list("abcdefghijklmnopq"), [""], [1], ["x" * 257])),
    *(("truncate", v) for v in (0, -1)),
    ("do_sample", "true"), ("details", "true"), ("watermark", True), ("watermark", 0), ("grammar", {"type": "json"}), ("adapter_id", 5),
]  # fmt: skip


PATHS = ("/generate", "/generate_stream", "/")


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:24])
def test_a_bad_parameter_is_refused(client: FlaskClient, model: FakeModel, name: str, value: Any) -> None:
    for path in PATHS:
        assert name in error(ask(client, path, **{name: value}))
    assert model.plans == 0


def test_both_names_of_stops_count(client: FlaskClient) -> None:
    assert done(client, stop=["b"], stop_sequences=["a"])["generated_text"] == "a"
    assert done(client, stop=["a"], stop_sequences=["b"])["generated_text"] == "a"


def test_bad_inputs_are_refused(client: FlaskClient) -> None:
    for body in (
        {"inputs": ""},
        *({"inputs": v} for v in (["a"], None, 5, True, {})),
        {"inputs": "a", "parameters": 5},
    ):
        for path in PATHS:
            error(client.post(path, json=body))


def test_inputs_are_asked_for_as_json(client: FlaskClient) -> None:
    error(client.post("/generate", json={"parameters": {}}))
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        refusal = error(client.post("/generate", data=b'{"inputs": "x"}', content_type=kind), 415)
        assert "Content-Type: application/json" in refusal
    assert "1,024" in error(client.post("/generate", json={"inputs": "x" * 2000}))


def test_unknown_parameters_are_named(client: FlaskClient) -> None:
    def named(path: str, body: dict[str, Any] | None = None, **parameters: Any) -> str | None:
        body = {"inputs": "hi", "parameters": {"max_new_tokens": 2} | parameters} | (body or {})
        reply = client.post(path, json=body)
        assert reply.status_code == 200
        return reply.headers.get("X-Ignored-Params")

    assert named("/generate", odd=1, watermark=False, grammar=None) == "parameters.odd"
    assert named("/generate", {"watermark": True}, watermark=False) == "watermark"
    for path, streams in (("/generate", False), ("/generate_stream", True)):
        assert named(path, {"stream": streams}) is None
        assert named(path, {"stream": not streams}) == "stream"
    assert named("/generate", top_n_tokens=2) == "parameters.top_n_tokens"
    assert named("/generate", top_n_tokens=2, details=True) is None
    assert named("/generate_stream", top_n_tokens=2) is None
    assert named("/generate_stream", decoder_input_details=True) == "parameters.decoder_input_details"
    greeted = client.post("/", json={"prompt": "x", "num_tokens": 5})
    assert greeted.headers["X-Ignored-Params"] == "prompt, num_tokens"


# ---------------------------------------------------------------- a real model, tiny


def test_the_prefill_joins_to_the_prompt(tiny: Tiny) -> None:
    text = "the house é " * 5
    body = {"inputs": text, "parameters": {"max_new_tokens": 1, "decoder_input_details": True}}
    prefill = tiny[0].post("/generate", json=body).get_json()["details"]["prefill"]
    assert "".join(t["text"] for t in prefill) == text
    assert prefill[0]["logprob"] is None
    assert all(t["logprob"] <= 0 for t in prefill[1:])

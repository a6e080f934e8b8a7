"""OpenAI's dialect: what completions, chat, models and tokenization take, answer and refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from support import EOT, FakeModel, fake_engine, write_checkpoint
from werkzeug.test import TestResponse

from api.service import Engine, Service
from app import connect, create_app, load_engine
from config import VERSION, Config

EOT_ID = 256


@pytest.fixture
def app(model: FakeModel) -> Iterator[Flask]:
    app = create_app(Config(policy="dynamic", max_batch_size=8, max_queue=12, access_log=False))
    service: Service = app.extensions["service"]
    engine = fake_engine(model, max_queue=12)
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


def error(reply: TestResponse, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.get_json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(reply.data) < 8192
    result: dict[str, Any] = body["error"]
    return result


# ---------------------------------------------------------------- completions


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
    reply = client.post("/v1/completions", json={"prompt": "x"})
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
    refusal = error(ask(client, prompt=["x"] * 21), 429)
    assert "this one adds 20, limit 20" in refusal["message"]
    assert app.extensions["service"].engine.tokenizer.encoded == 0
    assert app.extensions["service"].places.taken == 0
    assert len(texts(done(client, prompt=["x"] * 5, n=4))) == 20


def test_stops_end_the_text_and_are_named(client: FlaskClient) -> None:
    choice = done(client, max_tokens=20, stop=["zz", "de"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "de")
    choice = done(client, max_tokens=20, stop="de", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "abcde"
    choice = done(client, max_tokens=20, stop_token_ids=[100])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", 100)
    assert texts(done(client, max_tokens=4, stop_token_ids=[98], min_tokens=3)) == ["abcd"]


def test_end_of_text_ends_and_counts_but_is_not_shown(client: FlaskClient, model: FakeModel) -> None:
    model.says = [97, EOT_ID, 98]
    answer = done(client, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
    assert answer["usage"]["completion_tokens"] == 2
    assert choice["logprobs"]["tokens"] == ["a"]
    assert texts(done(client, ignore_eos=True)) == ["ab"]
    shown = done(client, ignore_eos=True, skip_special_tokens=False, logprobs=0)["choices"][0]
    assert shown["text"] == f"a{EOT}b"
    assert shown["logprobs"]["tokens"] == ["a", EOT, "b"]


def test_logprobs_have_four_lists_of_equal_length(client: FlaskClient, model: FakeModel) -> None:
    model.says = list("aé😀".encode())
    choice = done(client, prompt="hé", max_tokens=7, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert list(found) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert {len(v) for v in found.values()} == {7}
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", *(f"bytes:\\x{b:02x}" for b in "😀".encode())]
    assert found["text_offset"] == [2, 3, 3, 4, 4, 4, 4]
    assert all(top[t] == lp == max(top.values()) for t, lp, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"]))  # fmt: skip
    assert all(len(top) == 2 for top in found["top_logprobs"])


def test_an_echo_is_scored_from_its_second_token(client: FlaskClient) -> None:
    found = done(client, prompt="xyz", max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert found["tokens"] == ["x", "y", "z", "a"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 2, 3]
    answer = done(client, prompt="xyz", max_tokens=0, echo=True, logprobs=0)
    assert texts(answer) == ["xyz"]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert texts(done(client, prompt="x" * 1024, max_tokens=0, echo=True)) == ["x" * 1024]


def test_a_prompt_is_scored_in_vllms_form(client: FlaskClient) -> None:
    choice = done(client, prompt="xyé", max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [list(scores) for scores in rest] == [["121", "122"], ["195", "196"], ["169", "170"]]
    assert rest[0]["121"] == {"logprob": -0.5, "rank": 1, "decoded_token": "y"}
    assert rest[0]["122"] == {"logprob": -2.0, "rank": 2, "decoded_token": "z"}
    assert rest[1]["195"]["decoded_token"] == "\ufffd"
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in done(client)["choices"][0]
    alone = done(client, prompt=["x", "xy"], prompt_logprobs=0)["choices"]
    assert alone[0]["prompt_logprobs"] == [None]
    assert list(alone[1]["prompt_logprobs"][1]) == ["121"]


def test_an_echo_and_a_scored_prompt_have_each_their_own_number_of_alternatives(client: FlaskClient) -> None:
    for few, many in ((1, 3), (3, 1)):
        choice = done(client, max_tokens=1, echo=True, logprobs=few, prompt_logprobs=many)["choices"][0]
        assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, few, few]
        assert [scores and len(scores) for scores in choice["prompt_logprobs"]] == [None, many]


def test_the_first_chunk_of_each_choice_has_the_scores_of_its_prompt(client: FlaskClient) -> None:
    firsts: dict[int, Any] = {}
    for chunk in stream(client, prompt=["xy", "z"], n=2, max_tokens=9, prompt_logprobs=1)[:-1]:
        choice = chunk["choices"][0]
        assert ("prompt_logprobs" in choice) == (choice["index"] not in firsts)
        firsts.setdefault(choice["index"], choice.get("prompt_logprobs"))
    scored = [None, {"121": {"logprob": -0.5, "rank": 1, "decoded_token": "y"}}]
    assert firsts == {0: scored, 1: scored, 2: [None], 3: [None]}


def test_streamed_logprobs_are_those_of_the_text_beside_them(client: FlaskClient, model: FakeModel) -> None:
    model.says = list("aé😀bb".encode())
    model.before = lambda plan: time.sleep(0.004)
    fields = {"max_tokens": 18, "logprobs": 1, "echo": True, "stop": "bbb", "prompt": "é"}
    whole = done(client, **fields)["choices"][0]
    lists: dict[str, list[Any]] = {key: [] for key in whole["logprobs"]}
    text = ""
    for chunk in stream(client, **fields)[:-1]:
        choice = chunk["choices"][0]
        text += choice["text"]
        for key, values in choice["logprobs"].items():
            lists[key] += values
        raw = b"".join(name_bytes(t) for t in lists["tokens"])
        assert raw.decode() == text, "a token comes with its text"
    assert lists == whole["logprobs"]
    assert text == whole["text"]


def name_bytes(name: str) -> bytes:
    return bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode()


def stream(client: FlaskClient, **fields: Any) -> list[Any]:
    reply = ask(client, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    frames = [f.removeprefix("data: ") for f in reply.text.split("\n\n") if f.startswith("data: ")]
    return [f if f == "[DONE]" else json.loads(f) for f in frames]


def test_a_stream_tells_its_usage_if_it_is_asked_to(client: FlaskClient) -> None:
    plain = stream(client)
    assert all("usage" not in chunk for chunk in plain[:-1])
    asked = stream(client, stream_options={"include_usage": True})
    assert asked[-1] == "[DONE]"
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in asked[:-2])
    options = {"include_usage": True, "continuous_usage_stats": True}
    each = stream(client, stream_options=options)
    assert each[-3]["usage"]["total_tokens"] == 5
    same = ("id", "object", "created", "model")
    assert len({tuple(chunk[k] for k in same) for chunk in asked[:-1]}) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_says_how_many_tokens_its_choice_has_so_far(
    client: FlaskClient, model: FakeModel, path: str
) -> None:
    model.before = lambda plan: time.sleep(0.002)  # several tokens make a chunk
    reply = client.post(path, json={
        "prompt": ["ab", "c"], "messages": [USER], "n": 2, "max_tokens": 30, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    })  # fmt: skip
    *chunks, last = [json.loads(f[6:]) for f in reply.text.split("\n\n")[:-2]]
    texts: dict[int, str] = {}
    told: dict[int, dict[str, int]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        new = choice["text"] if "text" in choice else choice["delta"]["content"]
        texts[choice["index"]] = texts.get(choice["index"], "") + new
        told[choice["index"]] = chunk["usage"]
        assert chunk["usage"]["completion_tokens"] == len(texts[choice["index"]])  # a token is a letter
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + len(texts[choice["index"]])
    assert last["usage"]["completion_tokens"] == 30 * len(told)
    assert sum(u["prompt_tokens"] for u in told.values()) == 2 * last["usage"]["prompt_tokens"]


def test_a_stream_numbers_its_choices(client: FlaskClient) -> None:
    pieces: dict[int, str] = {}
    reasons: dict[int, list[Any]] = {}
    for chunk in stream(client, prompt=["a", "bb"], n=2, max_tokens=9)[:-1]:
        choice = chunk["choices"][0]
        pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
        reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert pieces == dict.fromkeys(range(4), "abcdefghi")
    assert all(r[-1] == "length" and not any(r[:-1]) for r in reasons.values())


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


def test_unknown_fields_are_named_and_harmless_ones_are_not(client: FlaskClient) -> None:
    reply = ask(client, nonsense=1, suffix=None, priority=3, stream_options=None, best_of=1)
    assert reply.headers["X-Ignored-Params"] == "nonsense, priority"  # `dynamic` does not go by it
    reply = ask(client, stream=True, stream_options={"include_usage": False, "odd": 1})
    assert reply.headers["X-Ignored-Params"] == "stream_options.odd"


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "x"), ("suffix", 0), ("response_format", {"type": "json_object"}),
     ("response_format", {"type": "text", "schema": {}})],
)  # fmt: skip
def test_a_field_of_openai_that_is_not_supported_is_refused(client: FlaskClient, name: str, value: Any) -> None:
    assert error(ask(client, **{name: value}))["param"] == name


def test_fields_of_other_servers_are_ignored_and_named(client: FlaskClient) -> None:
    reply = ask(client, use_beam_search=True, guided_json={"type": "object"})
    assert reply.status_code == 200
    assert reply.headers["X-Ignored-Params"] == "use_beam_search, guided_json"


@pytest.mark.parametrize(("name", "value"), [("response_format", {"type": "text"}), ("suffix", "")])
def test_a_field_that_changes_nothing_is_taken_and_not_called_ignored(
    client: FlaskClient, name: str, value: Any
) -> None:
    reply = ask(client, **{name: value})
    assert reply.status_code == 200, reply.text
    assert "X-Ignored-Params" not in reply.headers


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
                                        [True], [-1], [1.5], [10**20], ["x"] * 65, [[1]] * 65, [257], [1 << 40])),
    *(("max_tokens", v, "whole number") for v in (-2, "abc", 1.5, True, "5")),
    ("max_tokens", 0, "echo"),
    ("max_tokens", 1023, "at most 1,022"),
    ("max_tokens", 10**30, "at most 1,022"),
    *(("n", v, "1 to 16") for v in (0, -2, 17, 10**6, 10**18, "2", 1.5)),
    *(("best_of", v, "20") for v in (0, 21, 10**18)),
    *(("logprobs", v, "0 to 5") for v in (-1, 6, 100, True)),
    *(("prompt_logprobs", v, "0 to 5") for v in (-1, 6, False, "1")),
    *(("presence_penalty", v, "-2 to 2") for v in (-2.1, 5, "1", True)),
    *(("repetition_penalty", v, "above 0") for v in (0, -1)),
    *(("min_p", v, "0 to 1") for v in (-0.1, 1.1)),
    *(("min_tokens", v, "max_tokens") for v in (-1, 4)),
    *(("stop", v, "at most 16") for v in (list("abcdefghijklmnopq"), [1], "", "x" * 257)),
    *(("stop_token_ids", v, "token") for v in ([-1], [257], [1.5], 5, [True])),
    *(("logit_bias", v, "-100") for v in ({"1": 101}, {"a": 1}, {"1": "x"}, [1], {str(i): 1 for i in range(301)})),
    ("logit_bias", {"257": 1}, "0 to 256"),
    *(("echo", v, "without quotes") for v in (3, "true")),
    *(("stream", v, "without quotes") for v in ("yes", 1)),
    ("stream_options", {"include_usage": True}, "stream"),
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
    assert "at least n" in error(ask(client, n=3, best_of=2))["message"]
    assert "choose" in error(ask(client, best_of=2, stream=True))["message"]
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


# ---------------------------------------------------------------- models


def test_the_served_model_is_listed(client: FlaskClient) -> None:
    listed = client.get("/v1/models").get_json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert card == client.get("/v1/models/fake").get_json()
    assert (card["id"], card["object"], card["root"], card["parent"]) == ("fake", "model", "fake", None)
    assert card["max_model_len"] == 1024
    assert abs(card["created"] - time.time()) < 60


def test_the_version_is_told_before_the_model_is_there(client: FlaskClient) -> None:
    assert client.get("/version").get_json() == {"version": VERSION}
    loading = create_app(Config()).test_client()
    assert loading.get("/version").get_json() == {"version": VERSION}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_another_model_is_not_found(client: FlaskClient, path: str) -> None:
    body = {"model": "gpt-5", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    refusal = error(client.post(path, json=body), 404)
    assert (refusal["type"], refusal["param"]) == ("not_found_error", "model")
    assert refusal["code"] == "model_not_found"
    assert "'fake'" in refusal["message"]
    assert error(client.get("/v1/models/no/such"), 404)["code"] == "model_not_found"


# ---------------------------------------------------------------- chat


def chat(client: FlaskClient, *messages: dict[str, Any], **fields: Any) -> TestResponse:
    return client.post("/v1/chat/completions", json={"messages": list(messages), "max_tokens": 4} | fields)


USER = {"role": "user", "content": "Hi"}


def test_a_conversation_is_plain_text(client: FlaskClient, model: FakeModel) -> None:
    prompts: list[str] = []
    model.before = lambda plan: prompts.append(bytes(plan.sequences[0].prompt_ids).decode())
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "so?"}]
    reply = chat(
        client, {"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": parts}, max_tokens=1,
    )  # fmt: skip
    assert reply.status_code == 200
    assert prompts == ["System: Be brief.\nUser: Hi\nAssistant: Ho\nUser: How so?\nAssistant:"]


def test_a_chat_answer_has_every_field(client: FlaskClient) -> None:
    answer = chat(client, USER, n=2).get_json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abcd"}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8


def test_a_chat_answer_ends_where_the_user_would_speak(client: FlaskClient, model: FakeModel) -> None:
    model.says = list(b" Yes.\nUser: more")
    answer = chat(client, USER, max_completion_tokens=40, max_tokens=None).get_json()
    assert answer["choices"][0]["message"]["content"] == " Yes."
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_fields_of_a_message_that_nobody_reads_are_named(client: FlaskClient) -> None:
    said = {"role": "assistant", "content": "Ho", "refusal": None, "tool_calls": [], "audio": {"id": 1}}
    for stream in (False, True):
        reply = chat(client, USER | {"name": "Ada"}, said, USER, odd=1, stream=stream)
        assert reply.headers["X-Ignored-Params"] == "odd, messages.0.name, messages.1.audio"


def test_the_first_chunk_of_a_chat_has_the_role_and_text(client: FlaskClient) -> None:
    reply = chat(client, USER, stream=True, stream_options={"include_usage": True})
    frames = [f[6:] for f in reply.text.split("\n\n") if f]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(f) for f in frames[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert deltas[0]["content"]
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(d["content"] for d in deltas) == "abcd"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_chat_takes_all_the_room_by_default(client: FlaskClient) -> None:
    usage = chat(client, USER, max_tokens=None).get_json()["usage"]
    assert usage["total_tokens"] == 1024


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "text"}}, {"logprobs": False, "top_logprobs": 0}, {"chat_template_kwargs": {}},
     {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto"}],
    ids=repr,
)  # fmt: skip
def test_a_field_that_changes_nothing_in_a_chat_is_taken(client: FlaskClient, fields: dict[str, Any]) -> None:
    reply = chat(client, USER, **fields)
    assert reply.status_code == 200, reply.text
    assert "X-Ignored-Params" not in reply.headers


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chats_limit_of_minus_one_is_all_the_room_there_is(client: FlaskClient, name: str) -> None:
    usage = chat(client, USER, **{"max_tokens": None, name: -1}).get_json()["usage"]
    assert usage["total_tokens"] == 1024


def test_a_developer_speaks_as_the_system_and_an_assistant_may_have_said_nothing(
    client: FlaskClient, model: FakeModel
) -> None:
    prompts: list[str] = []
    model.before = lambda plan: prompts.append(bytes(plan.sequences[0].prompt_ids).decode())
    developer = {"role": "developer", "content": "Be brief."}
    for silent in ({"content": None}, {}, {"content": ""}):
        reply = chat(client, developer, {"role": "assistant"} | silent, USER, max_tokens=1)
        assert reply.status_code == 200, reply.text
    assert set(prompts) == {"System: Be brief.\nAssistant: \nUser: Hi\nAssistant:"}


@pytest.mark.parametrize(
    "fields",
    [{"messages": []}, {"messages": None}, {"messages": "x"}, {"messages": [{"role": "tool", "content": "x"}]},
     {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": None}]},
     {"messages": [{"role": "system"}]}, {"messages": [{"role": "developer", "content": None}]},
     {"messages": [{"role": "assistant", "content": 5}]}, {"messages": [{"role": "assistant", "content": []}]},
     {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
     {"messages": [{"role": "user", "content": []}]}, {"messages": ["x"]}, {"tools": [{}]}, {"logprobs": True},
     {"response_format": {"type": "json_object"}}, {"chat_template": "x"}, {"chat_template_kwargs": {"a": 1}},
     {"max_tokens": 0}, {"max_tokens": 3, "max_completion_tokens": 4}, {"n": 17}, {"top_logprobs": 1},
     {"max_tokens": -2}, {"max_completion_tokens": 0, "max_tokens": None}, {"tool_choice": "required"},
     {"logprobs": 0}, {"top_logprobs": False}],
    ids=repr,
)  # fmt: skip
def test_a_bad_chat_is_refused(client: FlaskClient, model: FakeModel, fields: dict[str, Any]) -> None:
    refusal = error(chat(client, USER, **fields))
    assert refusal["param"] in fields
    assert model.plans == 0


# ---------------------------------------------------------------- tokens


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


# ---------------------------------------------------------------- a real model, tiny

Tiny = tuple[FlaskClient, Engine]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = Config(policy="dynamic", model=str(folder), compute_threads=1, kv_memory=64 << 20, access_log=False)
    app = create_app(config)
    service: Service = app.extensions["service"]
    engine = load_engine(config)
    connect(service, engine)
    yield app.test_client(), engine
    engine.manager.stop()


def test_the_first_of_n_answers_is_the_one_of_n_1(tiny: Tiny) -> None:
    client, _ = tiny
    one = texts(done(client, max_tokens=12, seed=5))
    four = texts(done(client, max_tokens=12, seed=5, n=4))
    assert four[0] == one[0]
    assert len(set(four)) == 4
    assert four == texts(done(client, max_tokens=12, seed=5, n=4))
    assert texts(done(client, max_tokens=12, seed=5, n=2)) == four[:2]
    assert len(set(texts(done(client, max_tokens=12, n=3)))) == 3
    assert len(set(texts(done(client, max_tokens=12, n=3, temperature=0)))) == 1


def test_the_best_answers_come_first(tiny: Tiny) -> None:
    client, _ = tiny

    def score(choice: dict[str, Any]) -> float:
        return sum(choice["logprobs"]["token_logprobs"])

    fields = {"max_tokens": 8, "seed": 3, "logprobs": 0, "ignore_eos": True}
    every = done(client, **fields, n=6)["choices"]
    best = done(client, **fields, n=2, best_of=6)
    want = sorted(every, key=score, reverse=True)[:2]
    assert texts(best) == [c["text"] for c in want]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 16
    assert done(client, max_tokens=4, best_of=3, seed=3)["choices"][0]["logprobs"] is None


def test_greedy_logprobs_are_bit_equal_to_the_largest(tiny: Tiny) -> None:
    client, _ = tiny
    found = done(client, max_tokens=12, temperature=0, logprobs=5, ignore_eos=True)["choices"][0]["logprobs"]
    for lp, top in zip(found["token_logprobs"], found["top_logprobs"]):
        assert lp == max(top.values())
        assert sum(map(math.exp, top.values())) < 1.001


def test_a_prompt_is_scored_the_same_again_and_again(tiny: Tiny) -> None:
    client, engine = tiny
    prompt = "the house of the four " * 8
    fields = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    done(client, prompt=prompt, max_tokens=2)
    first = done(client, **fields)["choices"][0]
    again = done(client, **fields)
    ids = engine.tokenizer.encode(prompt)
    assert len(first["logprobs"]["tokens"]) == len(ids) > 32
    assert "".join(first["logprobs"]["tokens"]) == prompt == first["text"]
    assert all(isinstance(lp, float) for lp in first["logprobs"]["token_logprobs"][1:])
    pairs = zip(first["logprobs"]["token_logprobs"][1:], again["choices"][0]["logprobs"]["token_logprobs"][1:])
    assert all(abs(a - b) < 1e-4 for a, b in pairs)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert done(client, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_scoring_a_text_gives_what_generating_it_gave(tiny: Tiny) -> None:
    client, _ = tiny
    fields = {"temperature": 0, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    made = done(client, prompt="the ", max_tokens=10, **fields)["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    scored = done(client, prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0)
    after = scored["choices"][0]["logprobs"]["token_logprobs"][-10:]
    for a, b in zip(after, made["logprobs"]["token_logprobs"]):
        assert a == pytest.approx(b, abs=1e-3)


def test_a_scored_prompt_ranks_each_token_among_all(tiny: Tiny) -> None:
    client, engine = tiny
    prompt = "the house of the four " * 20  # longer than a step takes at once
    fields = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    choice = done(client, **fields, prompt_logprobs=5)["choices"][0]
    scores, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    echoed = done(client, **fields, echo=True, logprobs=5)["choices"][0]["logprobs"]
    assert (scores[0], len(scores)) == (None, len(ids))
    assert len(ids) > engine.manager.max_tokens_per_step or len(ids) > 100
    ranks = []
    for token, found, own in zip(ids[1:], scores[1:], echoed["token_logprobs"][1:]):
        one = found[str(token)]
        ranks.append(one["rank"])
        assert one["logprob"] == pytest.approx(own, abs=1e-3)
        assert one["decoded_token"] == engine.tokenizer.decode([token])
        by_rank = sorted(found.values(), key=lambda score: score["rank"])
        assert [s["logprob"] for s in by_rank] == sorted((s["logprob"] for s in by_rank), reverse=True)
        assert [s["rank"] for s in by_rank][:5] == [1, 2, 3, 4, 5]
        assert len(found) == (5 if one["rank"] <= 5 else 6)
    assert max(ranks) > 5


def test_bias_and_penalties_reach_the_sampler(tiny: Tiny) -> None:
    client, engine = tiny
    [token] = engine.tokenizer.encode("q")
    assert texts(done(client, logit_bias={str(token): 100}, max_tokens=5)) == ["qqqqq"]
    fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    plain = texts(done(client, **fields))[0]
    for change in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 3}):
        assert texts(done(client, **fields, **change))[0] != plain
    for same in ({"min_p": 1, "temperature": 1}, {"top_k": 1, "temperature": 2}, {"temperature": 1e-300}):
        assert texts(done(client, **fields | same))[0] == plain


@pytest.mark.parametrize("fields", [{"seed": 1}, {"temperature": 0, "stop": ["the", "\n"]}, {"seed": 2, "n": 3}])
def test_a_real_stream_joins_to_the_whole(tiny: Tiny, fields: dict[str, Any]) -> None:
    client, _ = tiny
    fields = {"max_tokens": 40, "prompt": "the ", **fields}
    pieces: dict[int, str] = {}
    for chunk in stream(client, **fields)[:-1]:
        choice = chunk["choices"][0]
        pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
    assert [pieces[i] for i in sorted(pieces)] == texts(done(client, **fields))

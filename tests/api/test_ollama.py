"""Ollama's dialect, on a fake model that says what a test wants and on a mock model, whose answers keep to any form."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from calls import Talk, connected, engine_of, service
from dialects import EVERY, PARIS, WRITTEN, Asked, functions, refused
from dialects import TOOLS as SCHEMAS
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import USER
from werkzeug.test import TestResponse

from api import streaming
from app import create_app
from config import Config
from tests.support.fakes import FakeModel, fake_engine

CHAT = next(dialect for dialect in EVERY if dialect.path == "/api/chat")
TOOLS = functions(Asked(tools=SCHEMAS))


@pytest.fixture
def client(talk: Talk) -> FlaskClient:
    return talk.client


@pytest.fixture
def plain(shared_app: Flask, model: FakeModel) -> Iterator[FlaskClient]:
    """Return a client of a model without a chat template, which answers a, b, c."""
    for app in connected(shared_app, fake_engine(model)):
        yield app.test_client()


def post(client: FlaskClient, path: str = "chat", **fields: Any) -> TestResponse:
    asked = {"messages": [USER]} if path == "chat" else {"prompt": "Hi"}
    return client.post(f"/api/{path}", data=json.dumps(asked | fields))


def whole(client: FlaskClient, path: str = "chat", **fields: Any) -> dict[str, Any]:
    reply = post(client, path, stream=False, **fields)
    assert (reply.status_code, reply.mimetype) == (200, "application/json"), reply.text
    answer: dict[str, Any] = reply.get_json()
    return answer


def lines(reply: TestResponse) -> list[dict[str, Any]]:
    assert (reply.status_code, reply.mimetype) == (200, "application/x-ndjson"), reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def error(reply: TestResponse, status: int = 400) -> str:
    return refused(reply, CHAT, status)


def test_an_answer_is_a_message_with_counts_and_times(client: FlaskClient) -> None:
    answer = whole(client)
    assert answer["message"] == {"role": "assistant", "content": "Hello."}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert (answer["prompt_eval_count"] > 5, answer["eval_count"] > 1) == (True, True)
    parts = [answer[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert all(type(part) is int and part > 0 for part in parts)
    assert sum(parts) <= answer["total_duration"] < 60e9


def test_a_stream_is_the_default_and_has_a_line_for_each_part(client: FlaskClient) -> None:
    *parts, last = lines(post(client))
    assert "".join(part["message"]["content"] for part in parts) == "Hello."
    assert not any(part["done"] or "done_reason" in part for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last.keys() == whole(client).keys()
    assert lines(post(client, "generate"))[0]["response"]


def test_a_call_comes_as_soon_as_it_is_whole(talk: Talk) -> None:
    talk.says("Wait." + WRITTEN)
    first = len(talk.tokenizer.encode("Wait." + WRITTEN.partition('\n<tool_call>\n{"name": "now"')[0]))
    read = threading.Event()
    talk.model.before = lambda plan: len(plan.sequences[0].output_ids) == first and not read.wait(60) and None
    reply = post(talk.client, tools=TOOLS)
    called: list[Any] = []
    for frame in reply.iter_encoded():
        if b'"tool_calls"' in frame:
            called.append(json.loads(frame)["message"]["tool_calls"])
            read.set()
    assert [[call["function"]["index"] for call in calls] for calls in called] == [[0], [1]]
    assert called[0][0]["function"]["arguments"] == PARIS


def test_a_call_that_is_cut_off_never_comes(talk: Talk) -> None:
    talk.says(WRITTEN)
    most = len(talk.tokenizer.encode(WRITTEN.partition('"now"')[0] + '"now", "arguments": {'))
    cut = {"tools": TOOLS, "options": {"num_predict": most}}
    for answer in (whole(talk.client, **cut), lines(post(talk.client, **cut))[-1]):
        assert answer["done_reason"] == "length"
        assert answer["message"].get("tool_calls", [])[1:] == []


def test_a_stream_whose_last_tokens_show_nothing_ends_at_once(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHECK_SECONDS", 60)
    monkeypatch.setattr(streaming, "SILENCE", 60)
    talk.says(WRITTEN)
    began = time.perf_counter()
    post(talk.client, tools=TOOLS, options={"num_predict": len(talk.tokenizer.encode(WRITTEN)) // 4}).close()
    assert time.perf_counter() - began < 40


def test_thinking_is_on_unless_it_is_turned_off(talk: Talk, client: FlaskClient) -> None:
    talk.says("<think>\nIs it?\n</think>\n\nYes.")
    for path, think in (("chat", None), ("chat", True), ("chat", "high"), ("generate", True)):
        answer = whole(client, path, think=think)
        said = answer.get("message", answer)
        assert (said["thinking"], said.get("content", said.get("response"))) == ("Is it?", "Yes.")
    assert whole(client, think=False)["message"]["content"].startswith("<think>")  # its template closes the part itself
    assert post(client, think="low").headers["X-Ignored-Params"] == "think"
    assert "X-Ignored-Params" not in post(client, think=True).headers


def test_a_model_that_does_not_think_refuses_to(plain: FlaskClient) -> None:
    for path in ("chat", "generate"):
        options = {"system": "Be short."} if path == "generate" else {}
        assert error(post(plain, path, think=True, **options)).startswith("think is true, but fake")
        assert post(plain, path, think=False, **options).status_code == 200
    assert post(plain, "generate", raw=True, think=True).headers["X-Ignored-Params"] == "think"


def test_a_form_is_kept_to_by_raw_prompts_and_may_be_json_or_empty(mock: FlaskClient) -> None:
    assert json.loads(whole(mock, "generate", format=SCHEMAS[0][1], raw=True)["response"]) == PARIS
    assert isinstance(json.loads(whole(mock, format="json")["message"]["content"]), dict)
    assert "format" not in post(mock, format="", options={"num_predict": 1}).headers.get("X-Ignored-Params", "")


@pytest.mark.parametrize("form", [7, "xml", ["a"], {"type": "object", "not": {}}, {"$ref": "http://x/y"}])
def test_a_form_that_cannot_be_enforced_is_refused_by_its_name(mock: FlaskClient, form: Any) -> None:
    for path in ("chat", "generate"):
        assert error(post(mock, path, format=form)).startswith("format ")


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_history_reads_as_in_openais_dialect(client: FlaskClient, talk: Talk) -> None:
    """Calls have no ids there, and results follow in their order."""
    calls = [{"function": {"name": "weather", "arguments": PARIS}}, {"function": {"name": "now", "arguments": {}}}]
    turn = {"role": "assistant", "thinking": "Hm.", "tool_calls": calls}
    results = [{"role": "tool", "content": content, "tool_name": "f"} for content in ("rain", "noon")]
    reply = post(client, messages=[USER, turn, *results], tools=TOOLS, stream=False)
    assert reply.status_code == 200, reply.text
    assert "X-Ignored-Params" not in reply.headers
    ids = ["call00100", "call00101"]
    known = [{"id": id, "type": "function", **call} for id, call in zip(ids, calls)]
    messages = [USER, {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": known},
                *({**r, "tool_call_id": id} for id, r in zip(ids, results))]  # fmt: skip
    client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "max_tokens": 4})
    assert talk.prompts[0] == talk.prompts[-1]
    assert "rain" in talk.prompts[0]


def test_options_are_those_of_chat_by_other_names(plain: FlaskClient, drawn: list[dict[str, Any]]) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 5, "repeat_penalty": 1.5,
               "presence_penalty": 1, "frequency_penalty": -1}  # fmt: skip
    renamed = {("repetition_penalty" if name == "repeat_penalty" else name): v for name, v in options.items()}
    for path in ("chat", "generate"):
        whole(plain, path, options=options)
        assert drawn[-1].items() >= renamed.items()
    whole(plain, options={"seed": -1})
    assert drawn[-1]["seed"] >= 0


def test_what_a_request_leaves_out_is_as_in_ollama_or_as_the_models_authors_say(
    shared_app: Flask, plain: FlaskClient, drawn: list[dict[str, Any]]
) -> None:
    engine = engine_of(shared_app)
    ollamas = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.0}
    for own in ({}, {"temperature": 0.6, "repetition_penalty": 1.1}):
        service(shared_app).engine = replace(engine, sampling=own)
        for path, options in product(("chat", "generate"), ({"num_predict": 1}, {"num_predict": 1, "top_k": 7})):
            whole(plain, path, options=options)
            assert drawn[-1].items() >= (ollamas | own | {"top_k": options.get("top_k", 40)}).items()
    assert len({sampling["seed"] for sampling in drawn}) == 8


def test_stops_and_limits_end_an_answer(plain: FlaskClient) -> None:
    assert whole(plain, options={"stop": "c"})["message"]["content"] == "ab"
    for unlimited in ({}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 0}):
        assert whole(plain, "generate", options={"stop": "z", **unlimited})["eval_count"] == 26
    assert "num_predict is 2,000" in error(post(plain, options={"num_predict": 2000}))
    assert error(post(plain, "generate", prompt="x" * 1024)).startswith("prompt has 1,024 tokens")


def test_a_prompt_is_put_into_the_template_unless_it_is_raw(talk: Talk) -> None:
    whole(talk.client, "generate", system="Be short.")
    assert "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n" in talk.prompts[0]
    whole(talk.client, "generate", raw=True)
    assert talk.prompts[-1] == "Hi"


def test_a_model_without_a_template_completes_a_prompt(plain: FlaskClient, prompts: list[str]) -> None:
    whole(plain, "generate")
    assert prompts[0] == "Hi"
    whole(plain, "generate", system="Be short.")
    assert prompts[-1] == "System: Be short.\nUser: Hi\nAssistant:"


def test_without_messages_or_prompt_nothing_is_computed(client: FlaskClient, model: FakeModel) -> None:
    for path, empty in (("chat", {"messages": []}), ("generate", {"prompt": ""}), ("generate", {"prompt": None})):
        answer = post(client, path, keep_alive=-1, **empty).get_json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert model.plans == 0


def test_fields_without_effect_are_named(client: FlaskClient) -> None:
    reply = post(client, keep_alive="5m", options={"num_ctx": 4096, "num_gpu": 1}, priority=3,
                 messages=[{**USER, "mood": "good"}])  # fmt: skip
    named = set(reply.headers["X-Ignored-Params"].split(", "))
    assert named == {"keep_alive", "options.num_ctx", "options.num_gpu", "messages.0.mood", "priority"}
    assert "X-Ignored-Params" not in post(client, messages=[{**USER, "images": []}], options={"mirostat": 0}).headers


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [("generate", {"suffix": "x"}, "suffix"), ("generate", {"template": "x"}, "template"), ("generate", {"context": [1]}, "context"),
     ("generate", {"images": ["aGk="]}, "images"), ("generate", {"raw": True, "system": "x"}, "raw"), ("generate", {"tools": TOOLS}, "tools"),
     ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages.0.images"), ("chat", {"logprobs": True}, "logprobs"),
     ("chat", {"options": {"mirostat": 2}}, "options.mirostat"), ("chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
     ("chat", {"options": {"temperature": "hot"}}, "options.temperature"), ("chat", {"options": {"num_predict": -3}}, "options.num_predict"),
     ("chat", {"options": 7}, "options"), ("chat", {"think": "deeply"}, "think"), ("chat", {"stream": "no"}, "stream"),
     ("chat", {"response_format": {"type": "json_object"}}, "response_format"), ("chat", {"tools": [TOOLS[0]] * 2}, "tools"),
     ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
     ("chat", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools.0.function.parameters"),
     ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}, "messages"),
     ("chat", {"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages"), ("chat", {"messages": "Hi"}, "messages"),
     ("chat", {"messages": [{"role": "boss", "content": "Hi"}]}, "messages.0.role"), ("chat", {"messages": [{"role": "user"}]}, "messages.0.content")],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(
    client: FlaskClient, model: FakeModel, path: str, fields: dict[str, Any], named: str
) -> None:
    assert error(post(client, path, **fields)).startswith(f"{named} ")
    assert model.plans == 0


def test_a_model_has_its_name_with_and_without_the_tag(client: FlaskClient) -> None:
    for name in ("fake", "fake:latest", None):
        assert whole(client, model=name)["model"] == (name or "fake")
    for name in ("fake:7b", "llama3", ""):
        assert "'fake'" in error(post(client, model=name), 404)
        assert "'fake'" in error(client.post("/api/show", json={"model": name or "x"}), 404)


def test_lists_and_facts_are_those_of_the_model(mock: FlaskClient, plain: FlaskClient) -> None:
    for path in ("/api/tags", "/api/ps"):
        (card,) = mock.get(path).get_json()["models"]
        assert (card["name"], card["context_length"]) == ("mock:llm-mock@1000", 1024)
        assert post(mock, model=card["model"], options={"num_predict": 1}).status_code == 200
        assert len(card["digest"]) == 64
    assert plain.get("/api/tags").get_json()["models"][0]["name"] == "fake:latest"
    for field in ("model", "name"):
        facts = mock.post("/api/show", json={field: "mock:llm-mock@1000"}).get_json()
        assert facts["model_info"][f"{facts['model_info']['general.architecture']}.context_length"] == 1024
        assert facts["capabilities"] == ["completion", "tools", "embedding"]
    version = mock.get("/api/version").get_json()["version"]  # Codex refuses an older Ollama
    assert (0, 13, 4) <= tuple(map(int, version.split("."))) < (1,)
    assert mock.head("/").status_code == 200


def test_a_model_that_thinks_says_so(client: FlaskClient) -> None:
    assert "thinking" in client.post("/api/show", json={}).get_json()["capabilities"]


def test_embeddings_are_those_of_openais_route(mock: FlaskClient) -> None:
    data = mock.post("/v1/embeddings", json={"input": ["hi", "you"]}).get_json()["data"]
    vectors = [item["embedding"] for item in data]
    reply = mock.post("/api/embed", json={"input": ["hi", "you"], "truncate": True, "keep_alive": 1})
    answer = reply.get_json()
    assert (answer["embeddings"], answer["prompt_eval_count"]) == (vectors, 2)
    assert 0 < answer["load_duration"] < answer["total_duration"]
    assert reply.headers["X-Ignored-Params"] == "keep_alive"
    assert mock.post("/api/embed", json={"input": "hi"}).get_json()["embeddings"] == vectors[:1]
    for fields, named in (({"input": []}, "input"), ({}, "input"), ({"input": "hi", "dimensions": 7}, "dimensions")):
        assert error(mock.post("/api/embed", json=fields)).startswith(f"{named} ")


def test_errors_have_ollamas_form_wherever_they_arise(client: FlaskClient) -> None:
    assert "Did you mean" in error(client.post("/api/chats"), 404)
    assert "POST" in error(client.get("/api/chat"), 405)
    assert "loading" in error(create_app(Config()).test_client().get("/api/tags"), 503)


def test_lines_are_in_ascii(talk: Talk) -> None:
    """A client that splits text at every line separator of Unicode must not cut one in two."""
    talk.says("a\u2028b\u0085c")
    reply = post(talk.client)
    assert reply.text.isascii()
    assert "".join(line["message"]["content"] for line in lines(reply)) == "a\u2028b\u0085c"

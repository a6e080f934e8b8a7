"""Forms over HTTP: enforced or refused in every dialect, and never ignored. The model writes short texts of any form."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import pytest
from calls import error
from flask.testing import FlaskClient
from openai_calls import USER, chat

from generate import grammar
from generate.short_text import short_text
from tests.support.schemas import REFUSED, TEXT, WHOLE, closed

# What free text cannot be.
PERSON = closed({"name": {"const": "Zoë"}, "age": {"type": "integer", "minimum": 41, "maximum": 43}})
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
    "schema of llama.cpp": {"response_format": {"type": "json_object", "schema": PERSON}},
    "schema of huggingface_hub": {"response_format": {"type": "json_object", "value": PERSON}},
    "schema of TGI": {"response_format": {"type": "json", "value": PERSON}},
    "structured_outputs": {"structured_outputs": {"json": PERSON}},
    "in a string": {"structured_outputs": {"json": json.dumps(PERSON)}},
    "guided_json": {"guided_json": PERSON},
}  # fmt: skip
TEXTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "choice": ({"structured_outputs": {"choice": ["left", "right"]}}, {"left", "right"}),
    "guided_choice": ({"guided_choice": ["left"]}, {"left"}),
    "regex": ({"structured_outputs": {"regex": "x{3}"}}, {"xxx"}),
    "guided_regex": ({"guided_regex": "x{3}"}, {"xxx"}),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, {"ab"}),
    "gbnf": ({"guided_grammar": 'root ::= "a" "b"'}, {"ab"}),
}  # fmt: skip


@pytest.fixture
def client(mock: FlaskClient) -> FlaskClient:
    return mock


def texts(client: FlaskClient, path: str, **fields: Any) -> list[str]:
    """Return the answers to a request with `n` or `best_of`."""
    if path == "/v1/chat/completions":
        answer = client.post(path, json={"messages": [USER], "max_tokens": 60, **fields}).get_json()
        return [choice["message"]["content"] for choice in answer["choices"]]
    answer = client.post(path, json={"prompt": "hi", "max_tokens": 60, **fields}).get_json()
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_form_is_enforced_by_each_of_its_fields(client: FlaskClient, path: str) -> None:
    for name, fields in FORMS.items():
        for text in texts(client, path, n=2, **fields):
            jsonschema.validate(json.loads(text), PERSON), name
    for name, (fields, possible) in TEXTS.items():
        assert set(texts(client, path, **fields)) <= possible, name
    assert json.loads(texts(client, path, response_format={"type": "json_object"})[0]) == {}


@pytest.mark.parametrize(
    "grammar",
    [{"type": "json", "value": PERSON}, {"type": "json", "value": json.dumps(PERSON)}, {"type": "json_schema", "value": {"name": "p", "schema": PERSON}},
     {"type": "json_schema", "value": PERSON}],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("path", ["/generate", "/"])
def test_tgi_enforces_its_grammar(client: FlaskClient, path: str, grammar: Any) -> None:
    answer = client.post(
        path, json={"inputs": "hi", "parameters": {"grammar": grammar, "max_new_tokens": 60}}
    ).get_json()
    text = (answer if path == "/generate" else answer[0])["generated_text"]
    jsonschema.validate(json.loads(text), PERSON)


def test_no_field_of_a_form_is_called_ignored(client: FlaskClient) -> None:
    for fields in (*FORMS.values(), *(fields for fields, _ in TEXTS.values()), {"response_format": {"type": "text"}}):
        reply = chat(client, USER, max_tokens=60, **fields)
        assert reply.status_code == 200
        assert "X-Ignored-Params" not in reply.headers


def test_a_stream_with_log_probabilities_joins_to_the_whole_answer(client: FlaskClient) -> None:
    fields = FORMS["schema"] | {"logprobs": True, "top_logprobs": 2, "max_tokens": 60}
    whole = chat(client, USER, **fields).get_json()["choices"][0]
    pieces = [bytes(token["bytes"]) for token in whole["logprobs"]["content"][:-1]]
    assert b"".join(pieces).decode() == whole["message"]["content"]
    text, scored = "", 0
    for line in chat(client, USER, stream=True, **fields).text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content") or ""
            scored += len((choice["logprobs"] or {"content": []})["content"])
    assert text == whole["message"]["content"]
    assert scored == len(whole["logprobs"]["content"])


def test_an_answer_that_is_cut_off_says_so(client: FlaskClient) -> None:
    (choice,) = chat(client, USER, max_tokens=4, **FORMS["schema"]).get_json()["choices"]
    assert choice["finish_reason"] == "length"


def test_ignore_eos_and_min_tokens_do_not_outlast_a_form(client: FlaskClient) -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 60}, {"min_tokens": 60, "stop": ["zz"]}):
        (choice,) = chat(client, USER, max_tokens=60, **fields, **FORMS["schema"]).get_json()["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_reason(client: FlaskClient, name: str) -> None:
    schema, reason = REFUSED[name]
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    refusal = error(chat(client, USER, **wanted))
    assert refusal["param"] == "response_format"
    assert reason in refusal["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema_": PERSON}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [PERSON]}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": PERSON}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": PERSON, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": PERSON, "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "((x{1000}){1000}){100}"}, "guided_regex"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": '{"items":' * 5_000 + "{}" + "}" * 5_000}, "guided_json"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"guided_json": PERSON, "guided_regex": "a"}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"guided_choice": ["x" * 200_000]}, "guided_choice"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_bad_form_is_refused_by_its_field(client: FlaskClient, fields: dict[str, Any], param: str) -> None:
    refusal = error(chat(client, USER, **fields))
    assert refusal["param"] == param
    assert len(refusal["message"]) < 800


def test_a_hostile_schema_of_a_megabyte_is_refused_before_it_is_compiled(client: FlaskClient) -> None:
    refusal = error(chat(client, USER, guided_json={"enum": [f"value {i}" for i in range(40_000)]}))
    assert "at most 131,072" in refusal["message"]


def test_many_schemas_leave_as_many_as_are_kept(client: FlaskClient) -> None:
    for i in range(300):
        client.application.extensions["service"].engine.grammars.compile("json", closed({f"key {i}": WHOLE, "b": TEXT}))
    text = client.get("/metrics").text
    assert "eb_forms_kept 256.0" in text
    assert float(text.split('eb_forms_total{result="compiled"} ')[1].split()[0]) >= 300
    assert 'eb_forms_total{result="refused"}' in text


def test_a_mock_model_finds_its_text_in_the_handler(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def find(matcher: Any, tokenizer: Any) -> list[int]:
        threads.append(threading.current_thread())
        return short_text(matcher, tokenizer)

    monkeypatch.setattr(grammar, "short_text", find)
    chat(client, USER, guided_regex="never seen [a-z]")
    assert threads == [threading.current_thread()]


def test_a_form_whose_text_a_mock_model_does_not_find_is_refused(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generate.short_text.MOST_SECONDS", 0.1)
    refusal = error(chat(client, USER, guided_regex=r"(.|\n)*[a-z]{300}(.|\n)*[A-Z]{300}"))
    assert refusal["param"] == "guided_regex"

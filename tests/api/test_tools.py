"""Tools, thinking and continued messages in /v1/chat/completions. The model is a fake, so its answers keep to the form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from calls import Talk, connected, engine_of, error, service
from dialects import WRITTEN
from flask import Flask
from flask.testing import FlaskClient
from openai_calls import USER, chat
from test_dialects import fits

from models.text.tool_format import ENOUGH, MISTRAL
from tests.support.fakes import FakeModel, fake_engine

PARIS = '{"city": "Paris"}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
HISTORY = [USER, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}]},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"}]  # fmt: skip


@pytest.fixture
def family() -> str:
    return "smollm2"


@pytest.fixture
def client(talk: Talk, forms: Any) -> FlaskClient:
    talk.says(WRITTEN)
    return talk.client


def choice(client: FlaskClient, *messages: Any, **fields: Any) -> dict[str, Any]:
    reply = chat(client, *(messages or [USER]), **{"max_tokens": 200} | fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.get_json()["choices"][0]
    return found


def without_ids(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def test_content_is_null_beside_calls(client: FlaskClient, talk: Talk) -> None:
    message = choice(client, tools=TOOLS)["message"]
    assert message["content"] is None
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    talk.says("Hello.")
    assert choice(client, tools=TOOLS)["message"] == {"role": "assistant", "content": "Hello."}


def test_an_answer_that_is_cut_off_in_a_call_says_so(client: FlaskClient) -> None:
    answer = choice(client, tools=TOOLS, max_tokens=80)
    assert answer["finish_reason"] == "length"
    cut = without_ids(answer["message"])[0]
    assert cut[0] == "weather"
    assert PARIS.startswith(cut[1])


@pytest.mark.parametrize("interval", [1, 3, None])
def test_a_stream_has_the_calls_of_the_whole_answer(client: FlaskClient, talk: Talk, interval: int | None) -> None:
    talk.says("Wait." + WRITTEN)
    whole = choice(client, tools=TOOLS)["message"]
    reply = chat(client, USER, tools=TOOLS, stream=True, max_tokens=200, n=2, stream_interval=interval, logprobs=True)
    frames = [json.loads(frame[6:]) for frame in reply.text.split("\n\n") if frame.startswith("data: {")]
    for number in range(2):
        choices = [c for frame in frames for c in frame["choices"] if c["index"] == number]
        deltas = [c["delta"] for c in choices]
        assert deltas[0]["role"] == "assistant"
        assert "".join(d.get("content") or "" for d in deltas) == "Wait."
        parts = [call for d in deltas for call in d.get("tool_calls", [])]
        assert all(len(d.get("tool_calls", [0])) == 1 for d in deltas)
        for place in range(2):
            first, *rest = [part for part in parts if part["index"] == place]
            assert (first["type"], first["function"]["arguments"], first["id"][:5]) == ("function", "", "call_")
            assert all(part.keys() == {"index", "function"} for part in rest)
            arguments = "".join(part["function"]["arguments"] for part in rest)
            assert (first["function"]["name"], arguments) == without_ids(whole)[place]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
        scored = [entry for c in choices for entry in c["logprobs"]["content"]]
        assert len(scored) == len(talk.model.says)
    assert len({*re.findall('"id":"(call_[^"]+)"', reply.text)}) == 4


def test_an_answer_may_be_text_or_one_call_whose_arguments_fit(client: FlaskClient, forms: Any) -> None:
    choice(client, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert (forms[0].param, forms[0].form.kind) == ("tools", "lark")
    source, schemas = forms[0].form[1:3]
    assert ("answer: TEXT |" in source, "call){0," in source) == (True, False)
    assert '\\"now\\", \\"arguments\\": " "{}"' in source
    assert [*schemas.values()] == [("json", SCHEMA | {"additionalProperties": False})]


@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "texts"),
    [({"guided_choice": ["a", "</tool_call>"]}, {"a": True, "</tool_call>": True, "b": False}), ({"guided_regex": "a/b"}, {"a/b": True, "a": False}),
     ({"guided_grammar": 'start: text\ntext: "a" | "b"'}, {"a": True, "b": True, "c": False}),
     ({"response_format": {"type": "json_object"}}, {"{}": True, "[]": False}), ({"guided_json": SCHEMA}, {PARIS: True, "{}": False})],
    ids=["choice", "regex", "grammar", "object", "schema"],
)  # fmt: skip
def test_a_form_is_an_alternative_to_calls_and_begins_after_thinking(
    client: FlaskClient, talk: Talk, forms: list[Any], fields: dict[str, Any], texts: dict[str, bool]
) -> None:
    thinks = talk.tokenizer.tool_format.thinks
    for called in ([], TOOLS):
        choice(client, tools=called, **fields)
        for text, fit in texts.items():
            assert fits(forms[-1], talk.tokenizer, text) == fit
            assert fits(forms[-1], talk.tokenizer, f"<think>x</think>\n\n{text}") == (fit and thinks)
        assert fits(forms[-1], talk.tokenizer, WRITTEN) == bool(called)
    choice(client, tools=TOOLS, tool_choice="required", **fields)
    assert [fits(forms[-1], talk.tokenizer, text) for text in (WRITTEN, *texts)] == [True, *[False] * len(texts)]
    choice(client, tools=TOOLS, tool_choice="none", **fields)
    assert [fits(forms[-1], talk.tokenizer, text) for text in texts] == [*texts.values()]


def test_a_schema_that_cannot_be_enforced_is_refused(client: FlaskClient, talk: Talk) -> None:
    bad = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "Rome"}}}}
    for name, shown in (("f", "tool-f"), ("my.f", "tool_1_my_f")):
        strict = {"type": "function", "function": {"name": name, "parameters": bad, "strict": True}}
        refusal = error(chat(client, USER, tools=[NOW, strict]))
        assert refusal["param"] == "tools"
        assert f"not at {shown}#/properties/city/not" in refusal["message"]
    assert error(chat(client, USER, tools=[NOW], guided_json=bad))["param"] == "guided_json"
    assert talk.model.plans == 0


@pytest.mark.parametrize("code", [
    *({"type": "string", "pattern": pattern} for pattern in (r"\b\w+\b", r"(a)\1", "[[]", r"\cA", r"[a-\d]")),
    {"$ref": "http://example.org/a"}, {"$ref": "#/$defs/none"}, {"type": "any"}, {"enum": []},
    {"type": "string", "minLength": 2, "maxLength": 1}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, None,
], ids=str)  # fmt: skip
def test_a_tool_whose_schema_cannot_be_enforced_at_all_takes_any_object(
    client: FlaskClient, talk: Talk, forms: list[Any], code: Any
) -> None:
    bad = {"type": "object", "properties": {} if code is None else {"code": code}, "required": ["code"]}
    tool = {"type": "function", "function": {"name": "now", "parameters": bad}}
    reply = chat(client, USER, tools=[WEATHER, tool])
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Ignored-Params"] == "tool-now#"
    texts = WRITTEN, WRITTEN.replace('"arguments": {}', '"arguments": {"a": 1}'), WRITTEN.replace('"Paris"', "5")
    assert [fits(forms[-1], talk.tokenizer, text) for text in texts] == [True, True, False]
    tool["function"]["strict"] = True
    assert error(chat(client, USER, tools=[WEATHER, tool]))["param"] == "tools"
    assert error(chat(client, USER, tools=[WEATHER], guided_json=bad | {"additionalProperties": False}))


@pytest.mark.parametrize("guidance", [{"lenient": True}, {"whitespace_flexible": True}])
def test_a_schema_cannot_turn_its_own_enforcement_off(
    client: FlaskClient, talk: Talk, forms: list[Any], guidance: dict[str, Any]
) -> None:
    schema = SCHEMA | {"x-guidance": guidance}
    choice(client, tools=[{"type": "function", "function": {"name": "weather", "parameters": schema}}])
    assert fits(forms[0], talk.tokenizer, WRITTEN.partition("\n<tool_call>")[0])
    assert not fits(forms[0], talk.tokenizer, WRITTEN.partition("\n<tool_call>")[0].replace(": ", ":"))


@pytest.mark.parametrize("family", ["mistral"])
def test_a_template_of_mistral_gets_short_ids(client: FlaskClient, talk: Talk) -> None:
    call = {"id": "call_0123456789ab", "type": "function", "function": {"name": "now", "arguments": ""}}
    result = {"role": "tool", "content": "5", "tool_call_id": call["id"]}
    reply = chat(client, USER, {"role": "assistant", "tool_calls": [call]}, result, tools=TOOLS)
    assert reply.status_code == 200
    short = re.findall(r'id": "(\w{9})"', talk.prompts[0])
    assert len(short) == 2
    assert len({*short}) == 1


def test_a_marker_that_is_a_control_token_is_read_too(
    client: FlaskClient, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = "[INST]"
    special = {marker: talk.tokenizer.vocabulary.control[marker]}
    monkeypatch.setattr(talk.tokenizer, "tool_format", replace(MISTRAL, marker=marker, control=special))
    talk.model.says = [
        *talk.tokenizer.encode("Hm"),
        special[marker],
        *talk.tokenizer.encode('[{"name": "now", "arguments": {}}]'),
        2,
    ]
    for stream in (False, True):
        reply = chat(client, USER, tools=TOOLS, stream=stream, max_tokens=200)
        assert "".join(re.findall('"content":"(.*?)"', reply.text)) == "Hm"  # a stream may send it in two pieces
        assert '"name":"now"' in reply.text
        assert marker not in reply.text


def test_a_model_without_a_template_gets_all_as_text(shared_app: Flask, forms: Any) -> None:
    model = FakeModel(list(WRITTEN.encode()) + [256])
    seen: list[str] = []
    model.before = lambda plan: seen.append(bytes(plan.sequences[0].prompt_ids).decode())
    for app in connected(shared_app, fake_engine(model, context=4096)):
        answer = choice(app.test_client(), *HISTORY, tools=TOOLS, max_tokens=400)
    assert without_ids(answer["message"]) == [("weather", PARIS), ("now", "{}")]
    assert seen[0].startswith("System: # Tools\n")
    assert seen[0].endswith(f"\nUser: The tool returned: rain{ENOUGH}\nAssistant:")


@pytest.mark.parametrize("family", ["qwen3"])
def test_no_stop_ends_thinking_and_a_variable_of_the_template_turns_it_off(
    client: FlaskClient, talk: Talk, forms: Any
) -> None:
    talk.says("<think>\nIs it?\n</think>\n\nYes.")
    message = choice(client, stop=["it", "s."])["message"]
    assert (message["reasoning_content"], message["content"]) == ("Is it?", "Ye")
    message = choice(client, chat_template_kwargs={"enable_thinking": False})["message"]
    assert message == {"role": "assistant", "content": "<think>\nIs it?\n</think>\n\nYes."}
    assert talk.prompts[-1].endswith("</think>\n\n")
    choice(client, tools=TOOLS)
    assert "start: thinks" in forms[0].form.source


def test_what_a_template_does_not_read_is_named(client: FlaskClient) -> None:
    variables = {"enable_thinking": False, "tools": [1], "messages": []}
    reply = chat(client, USER, chat_template_kwargs=variables, reasoning_effort="low")
    header = reply.headers["X-Ignored-Params"]
    assert header == ("chat_template_kwargs.enable_thinking, chat_template_kwargs.tools, chat_template_kwargs.messages, "
                      "reasoning_effort")  # fmt: skip
    assert "X-Ignored-Params" not in chat(client, USER, reasoning_effort="none").headers


@pytest.mark.parametrize("family", ["qwen3"])
def test_the_variables_of_a_request_never_replace_its_own_fields(client: FlaskClient, talk: Talk) -> None:
    reply = chat(client, USER, chat_template_kwargs={"tools": [WEATHER], "messages": [], "enable_thinking": False})
    assert reply.headers["X-Ignored-Params"] == "chat_template_kwargs.tools, chat_template_kwargs.messages"
    assert "Tells." not in talk.prompts[0]
    assert "Hi" in talk.prompts[0]


def test_a_message_is_continued(client: FlaskClient, talk: Talk) -> None:
    begun = {"role": "assistant", "content": "It is "}
    choice(client, USER, begun, continue_final_message=True, add_generation_prompt=False)
    assert talk.prompts[0].endswith("<|im_start|>assistant\nIt is ")
    choice(client, USER, begun, add_generation_prompt=False)
    assert talk.prompts[-1].endswith("It is <|im_end|>\n")
    for messages, begins in (([USER, begun], None), ([USER], False), (HISTORY[:2], False)):
        refusal = error(chat(client, *messages, continue_final_message=True, add_generation_prompt=begins))
        assert refusal["param"] == "continue_final_message"


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


@pytest.mark.parametrize("fields", [
    {"tools": [{}]}, {"tools": {}}, {"tools": [NOW] * 2}, {"tools": [NOW] * 129},
    function(name="a b"), function(name=""), function(name="x" * 65), function(name="f\n"), function(parameters=[]), function(parameters={"type": "string"}),
    function(parameters={"type": ["object", "null"]}), function(strict="yes"), function(description=5), {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tools": TOOLS, "tool_choice": "any"},
    {"tools": TOOLS, "tool_choice": {"type": "function"}}, {"tools": TOOLS, "parallel_tool_calls": 1}, {"chat_template_kwargs": []},
    {"reasoning_effort": 3},
], ids=lambda fields: str(fields)[:60])  # fmt: skip
def test_a_bad_choice_of_tools_is_refused(client: FlaskClient, talk: Talk, fields: dict[str, Any]) -> None:
    assert error(chat(client, USER, **fields))["param"] == list(fields)[-1]
    assert talk.model.plans == 0


def test_tools_that_are_too_long_are_named_and_counted_once(client: FlaskClient, talk: Talk) -> None:
    most = 1024 * talk.tokenizer.longest_token
    for length in (most // 2 + 100, most + 100):
        tool = {"type": "function", "function": {"name": "f", "description": "x" * length}}
        refusal = error(chat(client, USER, tools=[tool]))
        assert refusal["code"] == "context_length_exceeded"
        assert (refusal["param"] == "tools") == (length > most)  # the shorter one becomes too many tokens


def test_half_a_marker_is_no_text_where_a_call_is_required(client: FlaskClient, talk: Talk) -> None:
    talk.says("<tool_c" + " " * 400)
    for count in range(1, 8):
        for choice_of in ("required", "auto"):
            said = choice(client, tools=TOOLS, tool_choice=choice_of, max_tokens=count)["message"]
            assert not (choice_of == "required" and said["content"]), said


@pytest.mark.parametrize("family", ["smollm2", "qwen2.5", "llama3"])
@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "{}{}", "null"])
def test_a_call_that_was_cut_off_stays_in_the_conversation_and_is_named(
    client: FlaskClient, talk: Talk, arguments: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "content": "bad", "tool_call_id": "c"}
    reply = chat(client, USER, {"role": "assistant", "tool_calls": [call]}, result, tools=TOOLS)
    assert reply.status_code == 200, reply.text
    assert arguments in talk.prompts[0].replace('\\"', '"')
    assert reply.headers["X-Ignored-Params"] == "tool_calls.weather"


@pytest.mark.parametrize("arguments", [5, [1]])
def test_arguments_of_another_type_are_refused(client: FlaskClient, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert error(chat(client, USER, {"role": "assistant", "tool_calls": [call]}))["param"] == "messages"


def test_a_model_without_weights_calls_a_tool_until_it_has_the_result(
    shared_app: Flask, client: FlaskClient, talk: Talk, forms: Any
) -> None:
    service(shared_app).engine = replace(engine_of(shared_app), device="none")
    choice(client, tools=TOOLS)
    assert "answer: TEXT" not in forms[0].form.source
    assert choice(client, *HISTORY, tools=TOOLS)["message"] == {"role": "assistant", "content": WRITTEN}
    choice(client, *HISTORY, USER, tools=TOOLS)  # some clients add a message of their own
    assert [asked.form.source for asked in forms[1:]] == [["Done."]] * 2
    assert all("<tools>" in prompt and '"name": "weather"' in prompt for prompt in talk.prompts), talk.prompts

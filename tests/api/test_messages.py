"""Anthropic's dialect, /v1/messages. The model is a fake, so what it says does not keep to forms; a mock's answers do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from calls import Talk
from dialects import PARIS, WRITTEN
from dialects import message_joined as joined
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from app import create_app
from config import Config

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tells.", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, NOW]
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": PARIS}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
FORM = {"type": "json_schema", "schema": SCHEMA}


@pytest.fixture
def family() -> str:
    return "qwen2.5"


@pytest.mark.parametrize("family", ["qwen3"])
def test_thoughts_are_a_block_and_off_unless_they_are_asked_for(talk: Talk) -> None:
    talk.says("<think>\nHm.\n</think>\n\nYes.")
    reply = send(talk.client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert reply.headers["X-Ignored-Params"] == "thinking.budget_tokens"
    assert reply.get_json()["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    for fields, is_off in (({}, True), ({"thinking": {"type": "adaptive"}}, False)):
        answer(talk.client, **fields)
        assert talk.prompts[-1].endswith("</think>\n\n") == is_off


def test_a_choice_of_tools_may_allow_one_call(talk: Talk, forms: Any) -> None:
    answer(talk.client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert "call){0," not in forms[0].form.source


def send(client: FlaskClient, *said: Any, path: str = "/v1/messages", **fields: Any) -> TestResponse:
    return client.post(path, json={"messages": list(said or [USER]), "max_tokens": 200} | fields)


def answer(client: FlaskClient, *said: Any, **fields: Any) -> dict[str, Any]:
    reply = send(client, *said, **fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.get_json()
    return found


def refusal(reply: TestResponse, status: int = 400, type: str = "invalid_request_error") -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.get_json()
    assert (body["type"], body["error"]["type"]) == ("error", type)
    assert reply.headers["Request-Id"] == reply.headers["X-Request-Id"]
    found: dict[str, Any] = body["error"]
    return found


def events(reply: TestResponse) -> list[dict[str, Any]]:
    """Return the events of a stream after checking that each is named by its type."""
    frames = [frame.split("\n") for frame in reply.text.strip().split("\n\n")]
    found: list[dict[str, Any]] = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in found]
    return found


def test_a_message_is_answered(client: FlaskClient) -> None:
    reply = send(client, max_tokens=4, system="Be short.", temperature=0)
    assert "X-Ignored-Params" not in reply.headers
    found = reply.get_json()
    assert found.pop("id") == f"msg_{reply.headers['Request-Id']}"
    assert found == {
        "type": "message", "role": "assistant", "model": "fake", "content": [{"type": "text", "text": "abcd"}],
        "stop_reason": "max_tokens", "stop_sequence": None,
        "usage": {"input_tokens": 37, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 4},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [({"stop_sequences": ["x", "d"]}, "stop_sequence", "d", "abc"),
     ({"max_tokens": 5000}, "model_context_window_exceeded", None, None)],
)  # fmt: skip
def test_an_answer_says_why_it_ended(
    client: FlaskClient, fields: dict[str, Any], reason: str, sequence: str | None, text: str | None
) -> None:
    for found in (answer(client, **fields), joined(events(send(client, **fields, stream=True)))):
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
        assert text is None or found["content"][0]["text"] == text
    assert text is not None or found["usage"]["output_tokens"] == 1024 - found["usage"]["input_tokens"]


def test_an_empty_answer_has_no_blocks(talk: Talk) -> None:
    talk.says("")
    assert answer(talk.client)["content"] == joined(events(send(talk.client, stream=True)))["content"] == []


def test_the_events_of_a_stream_come_in_order(talk: Talk) -> None:
    talk.says("I look." + WRITTEN)
    found = events(send(talk.client, tools=TOOLS, stream=True))
    assert [event["type"] for event in found[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in found[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    indexes = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert indexes == [0, 1, 2] == [event["index"] for event in found if event["type"] == "content_block_start"]
    assert found[0]["message"]["stop_reason"] is None


def test_a_call_that_is_cut_off_is_left_out(talk: Talk) -> None:
    talk.says(WRITTEN)
    head = len(talk.tokenizer.encode(WRITTEN[: WRITTEN.index("Par")]))
    found = answer(talk.client, tools=TOOLS, max_tokens=head)
    assert (found["stop_reason"], found["content"]) == ("max_tokens", [])
    reply = send(talk.client, tools=TOOLS, max_tokens=head, stream=True)
    assert [e["content_block"]["name"] for e in events(reply) if "content_block" in e] == ["weather"]


def test_a_model_that_does_not_think_refuses_to(talk: Talk) -> None:
    assert "no thinking part" in refusal(send(talk.client, thinking={"type": "enabled"}))["message"]
    assert answer(talk.client, thinking={"type": "adaptive"})["content"][0]["text"] == "Hello."


def test_the_model_sees_calls_results_and_errors(talk: Talk) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]}
    failed = {"type": "tool_result", "tool_use_id": "call_2", "content": "no network", "is_error": True}
    text = {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}
    reply = send(talk.client, USER, said, {"role": "user", "content": [RESULT, failed, text]}, tools=TOOLS)
    assert reply.headers["X-Ignored-Params"] == "messages.2.content.2.cache_control"
    prompt = talk.prompts[0]
    assert '"description": "Tells."' in prompt
    assert 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert re.search("<tool_response>\nrain.*<tool_response>\nError: no network.*And now[?]", prompt, re.DOTALL)


def test_system_is_text_or_blocks(talk: Talk) -> None:
    for system in ("Be kind.\nBe short.", [{"type": "text", "text": f"Be {how}."} for how in ("kind", "short")]):
        answer(talk.client, system=system)
        assert "<|im_start|>system\nBe kind.\nBe short.<|im_end|>" in talk.prompts[-1]


@pytest.mark.parametrize("family", ["smollm2"])
def test_a_system_message_among_the_others_is_taken_in_its_place(talk: Talk) -> None:
    text = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    for role, content in (("system", "Be short."), ("system", text), ("developer", text)):
        said = [USER, {"role": role, "content": content}]
        answer(talk.client, *said, system="Be kind.")
        between = "<|im_end|>\n<|im_start|>"
        assert f"Be kind.{between}user\nHi{between}system\nBe short.<|im_end|>" in talk.prompts[-1]
        assert send(talk.client, *said, path="/v1/messages/count_tokens").get_json()["input_tokens"] > 0


def test_blocks_that_only_anthropics_servers_read_are_left_out_and_named(talk: Talk) -> None:
    kinds = ["redacted_thinking", "web_search_tool_result", "mcp_tool_result", "compaction"]
    use = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}
    blocks = [use, *({"type": kind} for kind in kinds), {"type": "text", "text": "I looked."}]
    reply = send(talk.client, **said(*blocks))
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Ignored-Params"] == ", ".join(f"messages.content.{name}" for name in ["web_search", *kinds])
    assert "assistant\nI looked.<" in talk.prompts[-1]


def test_a_tool_that_is_loaded_later_is_known_once_a_result_refers_to_it(talk: Talk) -> None:
    deferred = [NOW, WEATHER | {"defer_loading": True}]
    found = [{"type": "tool_reference", "tool_name": "weather"}, {"type": "image", "source": {}}]
    called = {"role": "assistant", "content": [USE | {"name": "now"}]}
    asked = [USER, called, {"role": "user", "content": [RESULT | {"content": found}]}]
    answer(talk.client, tools=deferred)
    assert "Tells." not in talk.prompts[-1]
    reply = send(talk.client, *asked, tools=deferred)
    assert "Tells." in talk.prompts[-1]
    assert "<tool_response>\nweather\n</tool_response>" in talk.prompts[-1]
    assert reply.headers["X-Ignored-Params"] == "tool_result.image"


def test_a_last_message_of_the_assistant_is_continued(talk: Talk) -> None:
    answer(talk.client, USER, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]})
    assert talk.prompts[0].endswith("<|im_start|>assistant\nIt is ")
    for content, fields in (([USE], {}), ([], {}), ("{", {"output_format": FORM})):
        refusal(send(talk.client, USER, {"role": "assistant", "content": content}, tools=TOOLS, **fields))


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def said(*content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(content)}, USER]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [WEATHER | fields]}


@pytest.mark.parametrize("fields", [
    {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": "9"}, {"messages": []}, {"messages": "Hi"}, {"temperature": 1.1}, {"stop_sequences": "x"},
    {"messages": [{"role": "tool", "content": "x"}]}, said(USE, role="system"), {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 5}]}, {"system": [5]}, {"system": 5},
    block(type="image", source={"type": "base64", "media_type": "image/png", "data": ""}), block(type="document", source={}), block(type="audio"), block(), block(type=["text"]),
    block(type="text"), block(type="text", text=5), block(type="tool_result"), block(type="thinking", thinking="x"), block(**USE),
    block(**RESULT | {"content": [{"type": "tool_reference"}]}), block(**RESULT | {"content": 5}),
    said(USE | {"input": "{}"}), said({"type": "tool_use", "id": "a", "name": "f"}), said(RESULT),
    {"tools": [{"name": "f"}]}, {"tools": [WEATHER] * 2}, {"tools": [WEATHER] * 129}, {"tools": {}},
    tool(name="a b"), tool(name=""), tool(name="x" * 65), tool(input_schema=[]), tool(input_schema={"type": "string"}), tool(description=5),
    {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "f"}}, {"tools": TOOLS, "tool_choice": {"type": "tool"}}, {"tools": TOOLS, "tool_choice": "any"},
    {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, {"tools": TOOLS, "tool_choice": {"type": "required"}},
    {"output_format": {"type": "json_schema"}}, {"output_format": {"type": "json_object"}}, {"output_format": {"type": "json_schema", "schema": 5}}, {"output_config": {"format": {}}}, {"output_config": FORM},
    {"thinking": {"type": "on"}}, {"thinking": True},
    {"mcp_servers": [{"url": "http://x"}]}, {"container": "x"}, {"response_format": {"type": "json_object"}}, {"stop": ["x"]}, {"n": 2},
], ids=lambda fields: str(fields)[:60])  # fmt: skip
def test_a_bad_request_is_refused(talk: Talk, fields: dict[str, Any]) -> None:
    message = refusal(send(talk.client, **fields))["message"]
    assert list(fields)[-1] in message
    assert talk.model.plans == 0
    if fields.keys() & {"messages", "tools", "tool_choice", "system", "thinking"}:
        refusal(send(talk.client, path="/v1/messages/count_tokens", **fields))


def test_what_changes_nothing_is_named(client: FlaskClient) -> None:
    fields = {"metadata": {"user_id": "x"}, "service_tier": "auto", "context_management": {"edits": []}}
    reply = send(client, **fields, output_config={"effort": "low"}, container=None)
    named = "metadata, service_tier, context_management, output_config.effort"
    assert reply.headers["X-Ignored-Params"] == named


def test_a_thread_is_refused_so_that_clients_send_all_messages(client: FlaskClient) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error = refusal(send(client, path=path, thread={"type": "create"}))
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_tokens_are_counted_as_a_message_uses_them(talk: Talk) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "system": "Be kind."}
    usage = answer(talk.client, **fields)["usage"]
    counted = send(talk.client, path="/v1/messages/count_tokens", **fields)
    assert counted.get_json() == {"input_tokens": usage["input_tokens"]}
    assert len(talk.prompts) == len(talk.model.says)  # the steps of the message: a count has none


def test_tokens_of_a_prompt_that_the_cache_had_are_counted_apart(mock: FlaskClient) -> None:
    long = {"role": "user", "content": "Say it again. " * 8}
    first, again = (answer(mock, long, max_tokens=1)["usage"] for _ in range(2))
    assert again["cache_read_input_tokens"] > 0 == first["cache_read_input_tokens"]
    assert again["input_tokens"] + again["cache_read_input_tokens"] == first["input_tokens"]


def test_errors_have_anthropics_form_and_status(client: FlaskClient) -> None:
    refusal(send(client, model="other"), 404, "not_found_error")
    assert answer(client, model="fake")["model"] == "fake"
    refusal(client.get("/v1/messages"), 405)


def test_the_key_may_be_in_anthropics_header() -> None:
    client = create_app(Config(api_key="k")).test_client()
    for headers in ({}, {"X-Api-Key": "other"}, {"X-Api-Key": "k", "Authorization": "Bearer other"}):
        reply = client.post("/v1/messages", json={}, headers=headers)
        assert "X-Api-Key" in refusal(reply, 401, "authentication_error")["message"]
    for headers in ({"X-Api-Key": "k"}, {"Authorization": "Bearer k"}):
        assert client.post("/v1/messages", json={}, headers=headers).status_code == 529  # loading

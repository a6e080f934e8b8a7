"""POST /v1/responses. The model is a fake, so its answers keep to the form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from calls import Talk, error
from dialects import SCHEMA, WRITTEN
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

PARIS = '{"city": "Paris"}'
NOW = {"type": "function", "name": "now"}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "description": "Tells.", "parameters": SCHEMA}, NOW]
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": PARIS}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "rain"}
IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.fixture
def family() -> str:
    return "smollm2"


@pytest.fixture
def client(talk: Talk) -> FlaskClient:
    return talk.client


def ask(client: FlaskClient, **fields: Any) -> TestResponse:
    return client.post("/v1/responses", json={"input": "Hi"} | fields)


def answer(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    reply = ask(client, **fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.get_json()
    return found


def events(client: FlaskClient, **fields: Any) -> list[dict[str, Any]]:
    reply = ask(client, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    found = []
    for frame in reply.text.strip().split("\n\n"):
        name, _, data = frame.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def plain(response: dict[str, Any]) -> list[Any]:
    """Return the output without ids."""
    return [
        (i["type"], i["status"], (i["name"], i["arguments"]) if "name" in i else i["content"][0]["text"])
        for i in response["output"]
    ]


def test_an_answer_is_a_response_with_one_message(client: FlaskClient) -> None:
    reply = ask(client, model="fake", store=True, metadata={"a": "b"}, instructions="Be brief.", temperature=0)
    found = reply.get_json()
    assert reply.headers["X-Ignored-Params"] == "store"
    assert plain(found) == [("message", "completed", "Hello.")]
    assert found["id"] == f"resp_{reply.headers['X-Request-Id']}"
    assert client.get(f"/requests/{found['id']}").status_code == 200
    wanted = {"object": "response", "status": "completed", "error": None, "incomplete_details": None, "store": False,
              "model": "fake", "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0, "tool_choice": "auto",
              "tools": [], "text": {"format": {"type": "text"}}, "previous_response_id": None}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    usage = found["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (7, usage["input_tokens"] + 7)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["input_tokens_details"] == {"cached_tokens": 0}


def test_an_empty_answer_has_an_empty_message(client: FlaskClient, talk: Talk) -> None:
    talk.model.says = [2]
    assert plain(answer(client)) == [("message", "completed", "")]
    assert plain(events(client, tools=TOOLS)[-1]["response"]) == [("message", "completed", "")]


def test_the_input_becomes_the_conversation(client: FlaskClient, talk: Talk) -> None:
    answer(client, instructions="Be brief.", input="Hi")
    prompt = talk.prompts[-1]
    assert "system\nBe brief." in prompt
    assert "user\nHi" in prompt
    parts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
    user = {"type": "message", "role": "user", "content": parts}
    answer(client, input=[{"role": "system", "content": "Be brief."}, user], instructions="")
    assert talk.prompts[-1] == prompt
    said = {"type": "message", "id": "m", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]}  # fmt: skip
    history = [user, {"type": "reasoning", "id": "r", "summary": []}, said, CALL, RESULT]
    answer(client, input=history, tools=TOOLS)
    assert '"description": "Tells."' in talk.prompts[-1]
    assert f'assistant\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n' in talk.prompts[-1]
    assert "user\nThe tool returned: rain\n" in talk.prompts[-1]
    answer(client, input=history, tools=TOOLS, tool_choice="none")
    assert "Tells." not in talk.prompts[-1]


def test_calls_and_results_of_other_tools_are_text_or_left_out(client: FlaskClient, talk: Talk) -> None:
    user = {"role": "user", "content": "Hi"}
    patch = {"type": "custom_tool_call", "call_id": "p", "name": "apply_patch", "input": "*** Begin"}
    output = [{"type": "input_text", "text": "done"}, IMAGE]
    done = {"type": "custom_tool_call_output", "call_id": "p", "output": output}
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}
    reply = ask(client, input=[user, search, {"type": "compaction"}, patch, done])
    assert reply.headers["X-Ignored-Params"] == (
        "input.web_search_call, input.compaction, input.output.input_image, tool_calls.apply_patch"
    )
    assert '{"name": "apply_patch", "arguments": *** Begin}' in talk.prompts[-1]
    assert "The tool returned: done" in talk.prompts[-1]


def test_an_answer_goes_into_the_next_input_as_it_is(client: FlaskClient, talk: Talk) -> None:
    talk.says("Wait." + WRITTEN)
    output = answer(client, tools=TOOLS)["output"]
    results = [{**RESULT, "call_id": item["call_id"]} for item in output[1:]]
    answer(client, input=[{"role": "user", "content": "Hi"}, *output, *results], tools=TOOLS)
    assert f"assistant\nWait.\n{WRITTEN}" in talk.prompts[-1]


@pytest.mark.parametrize("interval", [1, 3, None])
@pytest.mark.parametrize("text", ["Hello.", WRITTEN, "Wait." + WRITTEN])
def test_the_events_of_a_stream_add_up_to_the_whole_answer(
    client: FlaskClient, talk: Talk, interval: int | None, text: str
) -> None:
    talk.says(text)
    whole = answer(client, tools=TOOLS)
    found = events(client, tools=TOOLS, stream_interval=interval)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"] | {"id": 0} == whole | {
        "id": 0, "created_at": found[0]["response"]["created_at"], "status": "in_progress", "output": [], "usage": None,
    }  # fmt: skip
    assert found[-1]["type"] == "response.completed"
    assert plain(found[-1]["response"]) == plain(whole)
    assert found[-1]["response"]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for index, item in enumerate(found[-1]["response"]["output"]):
        own = [event for event in found if event.get("output_index") == index]
        part = "function_call_arguments" if item["type"] == "function_call" else "output_text"
        deltas = [event["delta"] for event in own if event["type"] == f"response.{part}.delta"]
        begins, ends = ["output_item.added"], [f"{part}.done"]
        if part == "output_text":
            begins, ends = [*begins, "content_part.added"], [*ends, "content_part.done"]
            assert "".join(deltas) == item["content"][0]["text"] == own[-3]["text"]
        else:
            assert "".join(deltas) == item["arguments"] == own[-2]["arguments"]
        names = [*begins, *[f"{part}.delta"] * len(deltas), *ends, "output_item.done"]
        assert [event["type"] for event in own] == [f"response.{name}" for name in names]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        assert (own[0]["item"]["status"], own[-1]["item"]) == ("in_progress", item)


@pytest.mark.parametrize(("most", "kept"), [(3, 0), (80, 2)])
def test_an_answer_that_is_cut_off_is_incomplete(client: FlaskClient, talk: Talk, most: int, kept: int) -> None:
    talk.says("Hello there." * 9 if not kept else "Wait." + WRITTEN)
    found = events(client, tools=TOOLS, max_output_tokens=most)
    response = found[-1]["response"]
    assert found[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == most
    assert [status for _, status, _ in plain(response)] == ["completed"] * (kept - 1) + ["incomplete"]
    assert plain(answer(client, tools=TOOLS, max_output_tokens=most)) == plain(response)


@pytest.mark.parametrize("family", ["qwen3"])
def test_thinking_is_an_item_of_its_own(client: FlaskClient, talk: Talk) -> None:
    thought = "<think>\nIs it?\n</think>"
    talk.says(thought + "\n\nYes.")
    whole = answer(client)
    assert plain(whole) == [("reasoning", "completed", "Is it?"), ("message", "completed", "Yes.")]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len(talk.tokenizer.encode(thought))}
    found = events(client, stream_interval=1)
    assert plain(found[-1]["response"]) == plain(whole)
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Is it?"
    cut = answer(client, max_output_tokens=len(talk.tokenizer.encode("<think>\nIs")))
    assert plain(cut) == [("reasoning", "incomplete", "Is")]
    assert cut["usage"]["output_tokens_details"]["reasoning_tokens"] == cut["usage"]["output_tokens"]
    talk.says("<think>\nA\n</think>\n\n" + WRITTEN)
    assert [kind for kind, _, _ in plain(answer(client, tools=TOOLS))] == ["reasoning"] + ["function_call"] * 2
    reply = ask(client, reasoning={"effort": "none", "summary": "auto"})
    assert [item["type"] for item in reply.get_json()["output"]] == ["message"]
    assert reply.headers["X-Ignored-Params"] == "reasoning.summary"


def test_what_has_no_effect_is_named(client: FlaskClient) -> None:
    encrypted = {"include": ["reasoning.encrypted_content"]}
    for fields, names in (
        ({"store": False, "truncation": "disabled", "background": False} | encrypted, None),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"prompt_cache_key": "k", "service_tier": "auto"}, "prompt_cache_key, service_tier"),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "top_logprobs": 0}, None),
    ):
        assert ask(client, **fields).headers.get("X-Ignored-Params") == names


@pytest.mark.parametrize(("fields", "param"), [
    ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input"), ({"input": None}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input"), ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"), ({"input": [{"type": "item_reference", "id": "m"}]}, "input"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"), ({"input": [{"role": "user", "content": "x"}, IMAGE]}, "input"), ({"input": [CALL, RESULT | {"output": 5}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"), ({"input": [CALL | {"name": None}]}, "input"),
    ({"input": [CALL | {"arguments": 5}]}, "input"), ({"input": [{"type": "web_search_call", "id": "w"}]}, "input"),
    ({"input": "x" * 99_999}, "input"), ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 9999}, "max_output_tokens"),
    ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"), ({"max_tokens": 5}, "max_tokens"), ({"messages": [{"role": "user"}]}, "messages"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "c"}, "conversation"), ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"truncation": "auto"}, "truncation"), ({"top_logprobs": 2}, "top_logprobs"), ({"n": 2}, "n"),
    ({"include": ["message.output_text.logprobs"]}, "include"), ({"text": {"verbosity": "low"}}, "text"), ({"text": 5}, "text"),
    ({"text": {"format": {"type": "xml"}}}, "text"), ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [NOW, NOW]}, "tools"), ({"tools": [NOW | {"name": "a b"}]}, "tools"), ({"tools": [NOW | {"parameters": []}]}, "tools"),
    ({"tools": [NOW | {"strict": True, "parameters": {"type": "object", "not": {}}}]}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"), ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"reasoning": {"effort": 3}}, "reasoning"), ({"temperature": 3}, "temperature"), ({"stop": [""]}, "stop"), ({"return_token_ids": True}, "return_token_ids"),
], ids=lambda value: str(value)[:60])  # fmt: skip
def test_what_cannot_be_done_is_refused(client: FlaskClient, talk: Talk, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        refusal = error(ask(client, stream=stream, **fields))
        assert refusal["param"] == param
        assert "response_format" not in refusal["message"] or param == "response_format"
        assert " messages" not in refusal["message"] or param == "input"
    assert talk.model.plans == 0


def test_a_stream_that_fails_says_so_and_closes_its_items(client: FlaskClient, talk: Talk) -> None:
    def fail(plan: Any) -> None:
        if len(plan.sequences[0].output_ids) == 2:
            raise RuntimeError("broken")

    talk.model.before = fail
    assert error(ask(client), 500)["type"] == "server_error"
    found = events(client, stream_interval=1)
    assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.failed")
    response = found[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert [item["status"] for item in response["output"]] in ([], ["incomplete"])


def test_a_form_is_repeated_and_may_be_any_object(mock: FlaskClient) -> None:
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    assert answer(mock, text=text)["text"] == text
    assert isinstance(json.loads(plain(answer(mock, text={"format": {"type": "json_object"}}))[0][2]), dict)

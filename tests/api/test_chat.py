"""/v1/chat/completions."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from calls import error
from flask.testing import FlaskClient
from openai_calls import USER, chat

from tests.support.fakes import FakeModel


def test_a_conversation_is_plain_text(client: FlaskClient, prompts: list[str]) -> None:
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


@pytest.mark.parametrize(("limit", "is_open_ended"), [(None, True), (3, False)])
def test_a_chat_without_max_tokens_is_open_ended(
    client: FlaskClient, model: FakeModel, limit: int | None, is_open_ended: bool
) -> None:
    flags: set[bool] = set()
    model.before = lambda plan: flags.update(seq.open_ended for seq in plan.sequences)
    assert chat(client, USER, max_tokens=limit).status_code == 200
    assert flags == {is_open_ended}


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


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "text"}}, {"logprobs": False, "top_logprobs": 0}, {"chat_template_kwargs": {}},
     {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto"},
     {"modalities": ["text"], "reasoning_effort": "none", "audio": None}],
    ids=repr,
)  # fmt: skip
def test_a_field_that_changes_nothing_in_a_chat_is_taken(client: FlaskClient, fields: dict[str, Any]) -> None:
    reply = chat(client, USER, **fields)
    assert reply.status_code == 200, reply.text
    assert "X-Ignored-Params" not in reply.headers


@pytest.mark.parametrize("limit", [{}, {"max_tokens": -1}, {"max_completion_tokens": -1}], ids=str)
def test_a_chat_takes_all_the_room_there_is(client: FlaskClient, limit: dict[str, int]) -> None:
    usage = chat(client, USER, **{"max_tokens": None} | limit).get_json()["usage"]
    assert usage["total_tokens"] == 1024


def test_a_developer_speaks_as_the_system_and_an_assistant_may_have_said_nothing(
    client: FlaskClient, prompts: list[str]
) -> None:
    developer = {"role": "developer", "content": "Be brief."}
    for silent in ({"content": None}, {}, {"content": ""}):
        reply = chat(client, developer, {"role": "assistant"} | silent, USER, max_tokens=1)
        assert reply.status_code == 200, reply.text
    assert set(prompts) == {"System: Be brief.\nAssistant: \nUser: Hi\nAssistant:"}


@pytest.mark.parametrize(
    "fields",
    [{"messages": []}, {"messages": None}, {"messages": "x"}, {"messages": [{"role": "tool"}]}, {"messages": [{"role": "god", "content": "x"}]},
     {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
     {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": None}]},
     {"messages": [{"role": "system"}]}, {"messages": [{"role": "developer", "content": None}]},
     {"messages": [{"role": "assistant", "content": 5}]}, {"messages": [{"role": "assistant", "content": []}]},
     {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
     {"messages": [{"role": "user", "content": []}]}, {"messages": ["x"]}, {"tools": [{}]}, {"logprobs": True, "top_logprobs": 21},
     {"modalities": ["text", "audio"]}, {"audio": {"voice": "ash"}}, {"prediction": {}},
     {"response_format": {"type": "json_schema"}}, {"chat_template": "x"}, {"chat_template_kwargs": 1},
     {"max_tokens": 0}, {"n": 17}, {"top_logprobs": 1},
     {"max_tokens": -2}, {"max_completion_tokens": 0, "max_tokens": None}, {"tool_choice": "required"},
     {"logprobs": 0}, {"top_logprobs": False}],
    ids=repr,
)  # fmt: skip
def test_a_bad_chat_is_refused(client: FlaskClient, model: FakeModel, fields: dict[str, Any]) -> None:
    refusal = error(chat(client, USER, **fields))
    assert refusal["param"] in fields
    assert model.plans == 0


def test_a_picture_is_not_fetched(client: FlaskClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.setblocking(False)
        picture = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{bait.getsockname()[1]}/x.png"}}
        error(chat(client, {"role": "user", "content": [picture]}))
        with pytest.raises(BlockingIOError):
            bait.accept()


def test_a_chat_may_have_as_many_messages_as_fit_into_its_body(client: FlaskClient) -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": ""} for n in range(1001)]
    answer = error(client.post("/v1/chat/completions", json={"messages": messages}))
    assert answer["code"] == "context_length_exceeded"  # and not the number of messages


def test_a_chat_that_is_longer_than_the_context_is_measured_by_its_messages_alone(client: FlaskClient) -> None:
    long = {"role": "user", "content": "x" * 1010}
    refusal = error(chat(client, long, max_tokens=None))
    assert refusal["param"] == "messages"
    assert "1,027 tokens" in refusal["message"]
    assert "1,024" in refusal["message"]
    assert "max_tokens" not in refusal["message"]
    assert error(chat(client, USER, max_tokens=2000))["param"] == "max_tokens"
    assert error(chat(client, long, max_tokens=5))["param"] == "messages"


def test_a_chat_of_too_many_messages_is_asked_for_the_last_ones(client: FlaskClient) -> None:
    refusal = error(chat(client, *[USER] * 4097, max_tokens=1))
    assert refusal["param"] == "messages"
    assert "4,096" in refusal["message"]

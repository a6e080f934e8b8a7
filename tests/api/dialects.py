"""The dialects of the API: how each asks for the same, and what its answers and streams say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from flask.testing import FlaskClient
from openai_calls import USER
from werkzeug.test import TestResponse

Body = dict[str, Any]
PARIS = {"city": "Paris"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
UNENFORCEABLE = {"type": "object", "properties": {"city": {"not": {"const": "Rome"}}}}
TOOLS = [("weather", SCHEMA), ("now", {"type": "object", "properties": {}})]
CALLS = (("weather", PARIS), ("now", {}))
WRITTEN = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>' for name, given in CALLS
)


class Asked(NamedTuple):
    """A request in the words of no dialect."""

    stream: bool = False
    prompt: str = "Hi"
    limit: Any = 400
    stop: Any = ()
    model: str | None = None
    tools: Any = ()
    choice: str | None = None  # required, none, auto or a name
    form: Body | None = None
    history: bool = False  # whether a tool has been called and has answered

    def named(self, name: Body, **words: str) -> Any:
        """Return the choice: one of the words of a dialect, or what names a tool."""
        return {**{word: word for word in ("auto", "required", "none")}, **words}.get(self.choice or "auto", name)


class Answer(NamedTuple):
    text: str
    reason: str
    tokens: int
    thought: str = ""
    calls: tuple[tuple[str, Body], ...] = ()
    ids: tuple[str, ...] = ()


def put_together(parts: list[Body], reason: str, tokens: int) -> Answer:
    """Return the answer that a message is, or the deltas of one."""
    calls: list[list[Any]] = []
    for call in (call for part in parts for call in part.get("tool_calls") or ()):
        given = call["function"]["arguments"]
        if "id" in call:
            calls.append([call["id"], call["function"]["name"], given])
        else:
            calls[call["index"]][2] += given
    text, thought = (
        "".join(part.get(name) or part.get(other) or "" for part in parts)
        for name, other in (("content", "response"), ("reasoning_content", "thinking"))
    )
    made = tuple((name, json.loads(given) if isinstance(given, str) else given) for _, name, given in calls)
    return Answer(text, reason, tokens, thought, made, tuple(id for id, *_ in calls))


def of_openai(bodies: list[Any]) -> Answer:
    choices = [choice for body in bodies for choice in body["choices"]]
    parts = [{"content": one["text"]} if "text" in one else one.get("message") or one["delta"] for one in choices]
    return put_together(parts, choices[-1]["finish_reason"], bodies[-1]["usage"]["completion_tokens"])


def of_ollama(bodies: list[Any]) -> Answer:
    parts = [body.get("message", body) for body in bodies]
    return put_together(parts, bodies[-1]["done_reason"], bodies[-1]["eval_count"])


def of_inference(bodies: list[Any]) -> Answer:
    parts = [{"content": body.get("text") or body.get("completion", "").removeprefix("Hi")} for body in bodies]
    return put_together(parts, bodies[-1]["finish_reason"], bodies[-1]["num_tokens"])


def of_generate(bodies: list[Any]) -> Answer:
    last = bodies[-1][0] if isinstance(bodies[-1], list) else bodies[-1]
    return Answer(last["generated_text"], last["details"]["finish_reason"], last["details"]["generated_tokens"])


def of_blocks(blocks: list[Body], reason: str, tokens: int) -> Answer:
    """Return the answer that Anthropic's blocks or the items of a response are."""
    texts = {"text": "", "thinking": ""}
    calls = [one for one in blocks if "name" in one]
    for one in blocks:
        kind = {"message": "text", "reasoning": "thinking"}.get(one["type"], one["type"])
        if kind in texts:
            texts[kind] += one[kind] if kind in one else one["content"][0]["text"]
    made = tuple((one["name"], one["input"] if "input" in one else json.loads(one["arguments"])) for one in calls)
    ids = tuple(one["id"] if "input" in one else one["call_id"] for one in calls)
    return Answer(texts["text"], reason, tokens, texts["thinking"], made, ids)


def message_joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, as clients put it together."""
    message: dict[str, Any] = found[0]["message"]
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[
                event["delta"]["type"]
            ]
            field = "json" if name == "partial_json" else name
            message["content"][-1][field] += event["delta"][name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        written = block.pop("json")
        block |= {"input": json.loads(written)} if block["type"] == "tool_use" else {}
    return message


def of_message(bodies: list[Any]) -> Answer:
    body = message_joined(bodies) if len(bodies) > 1 else bodies[0]
    return of_blocks(body["content"], body["stop_reason"], body["usage"]["output_tokens"])


def of_response(bodies: list[Any]) -> Answer:
    body = bodies[-1].get("response", bodies[-1])
    return of_blocks(body["output"], body["status"], body["usage"]["output_tokens"])


def functions(asked: Asked) -> list[Body]:
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in asked.tools]


def openai(asked: Asked) -> Body:
    usage = {"include_usage": True} if asked.stream else None
    return {"stream_options": usage, "max_tokens": asked.limit, "stop": asked.stop, "model": asked.model}


def completion(asked: Asked) -> Body:
    return openai(asked) | {"prompt": asked.prompt, "guided_json": asked.form}


def inference(asked: Asked) -> Body:
    return {"prompt": asked.prompt, "num_tokens": asked.limit, "stop": asked.stop, "ignore_eos": False}


def chat(asked: Asked) -> Body:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": json.dumps(PARIS)}}
    history = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain", "tool_call_id": "c"}]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": asked.form}} if asked.form else None
    return openai(asked) | {
        "messages": [USER | {"content": asked.prompt}, *(history if asked.history else ())], "tools": functions(asked),
        "tool_choice": asked.named({"type": "function", "function": {"name": asked.choice}}), "response_format": form,
    }  # fmt: skip


def responses(asked: Asked) -> Body:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": json.dumps(PARIS)}
    history = [call, {"type": "function_call_output", "call_id": "c", "output": "rain"}]
    form = {"format": {"type": "json_schema", "name": "a", "schema": asked.form}} if asked.form else None
    return {
        "input": [USER | {"content": asked.prompt}, *(history if asked.history else ())], "model": asked.model,
        "tools": [tool | tool.pop("function") for tool in functions(asked)], "max_output_tokens": asked.limit,
        "tool_choice": asked.named({"type": "function", "name": asked.choice}), "stop": asked.stop, "text": form,
    }  # fmt: skip


def message(asked: Asked) -> Body:
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": PARIS}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "rain"}
    history = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    choice = asked.named("tool", required="any")  # type: ignore[arg-type]
    form = {"format": {"type": "json_schema", "schema": asked.form}} if asked.form else None
    return {
        "messages": [USER | {"content": asked.prompt}, *(history if asked.history else ())], "model": asked.model,
        "max_tokens": asked.limit, "stop_sequences": asked.stop, "output_config": form,
        "tools": [{"name": name, "input_schema": schema} for name, schema in asked.tools],
        "tool_choice": {"type": choice} | ({"name": asked.choice} if choice == "tool" else {}),
    }  # fmt: skip


def ollama(asked: Asked) -> Body:
    options = {"num_predict": asked.limit, "stop": asked.stop}
    return {"prompt": asked.prompt, "format": asked.form, "options": options, "model": asked.model}


def ollama_chat(asked: Asked) -> Body:
    call = {"function": {"name": "weather", "arguments": PARIS}}
    history = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain", "tool_name": "weather"}]
    messages = [USER | {"content": asked.prompt}, *(history if asked.history else ())]
    return ollama(asked) | {"prompt": None, "messages": messages, "tools": functions(asked)}


def generate(asked: Asked) -> Body:
    grammar = {"type": "json", "value": asked.form} if asked.form else None
    return {
        "inputs": asked.prompt,
        "parameters": {"max_new_tokens": asked.limit, "stop": asked.stop, "details": True, "grammar": grammar},
    }


class Dialect(NamedTuple):
    path: str
    body: Callable[[Asked], Body]
    read: Callable[[list[Any]], Answer]
    reasons: tuple[str, str, str] = ("length", "stop", "stop")  # of an end by the limit, by a stop, by itself
    called: str = ""
    form: str = ""  # the field that asks for a form
    think: Body = {}
    silent: Body = {}  # what turns thinking off
    failure: Callable[[Any], bool] = lambda last: last["error"]["type"] == "server_error"  # of a stream's last event
    keeps_stop: bool = False
    bad: int = 400
    broken: int = 500
    full: int = 503

    @property
    def posted(self) -> str:
        """The path that refuses what is no request at all, which the root greets."""
        return "/generate" if self.path == "/" else self.path


def error_type(kind: str) -> Callable[[Any], bool]:
    """Return what holds for the last event of a stream that fails: an error of this kind."""
    return lambda last: last["error"]["type"] == kind


EVERY = [
    Dialect("/inference", inference, of_inference),
    Dialect("/v1/completions", completion, of_openai, form="guided_json"),
    Dialect("/v1/chat/completions", chat, of_openai, called="tool_calls", form="response_format",
            silent={"reasoning_effort": "none"}),
    Dialect("/v1/responses", responses, of_response, ("incomplete", "completed", "completed"), "completed",
            form="text.format", silent={"reasoning": {"effort": "none"}},
            failure=lambda last: last["response"]["error"]["code"] == "server_error"),
    Dialect("/v1/messages", message, of_message, ("max_tokens", "stop_sequence", "end_turn"), "tool_use",
            "output_config", {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}, error_type("api_error"),
            full=529),
    Dialect("/", generate, of_generate, ("length", "stop_sequence", "eos_token"), form="grammar", keeps_stop=True,
            failure=lambda last: (last["error_type"], type(last["error"])) == ("generation", str), bad=422, broken=424),
    Dialect("/api/chat", ollama_chat, of_ollama, called="stop", form="format", silent={"think": False},
            failure=lambda last: [*last] == ["error"]),
    Dialect("/api/generate", ollama, of_ollama, form="format", failure=lambda last: [*last] == ["error"]),
]  # fmt: skip
ANTHROPICS = {413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}  # names of errors by status
CHATS = [dialect for dialect in EVERY if dialect.called]
CHOOSING = [dialect for dialect in CHATS if dialect.path != "/api/chat"]
every_dialect = pytest.mark.parametrize("dialect", EVERY, ids=lambda dialect: dialect.path)


def body_of(dialect: Dialect, **asked: Any) -> Body:
    body = dialect.body(Asked(**asked)) | {"stream": asked.get("stream", False)}
    return {name: value for name, value in body.items() if value not in (None, [], ())}


def post(client: FlaskClient, dialect: Dialect, fields: Body | None = None, **asked: Any) -> TestResponse:
    body = body_of(dialect, **asked)
    body.get("parameters", body).update(fields or {})
    return client.post(dialect.path, json=body)


def refused(reply: TestResponse, dialect: Dialect, status: int = 0) -> str:
    """Return what a refusal says, after checking what each promises: its status, its form, and no secrets."""
    assert reply.status_code == (status or dialect.bad), reply.text
    assert reply.mimetype == "application/json"
    assert len(reply.data) < 8192
    assert not any(word in reply.text for word in ("Traceback", ".py", "site-packages"))
    body = reply.get_json()
    found = body["error"]
    keys = {"/": {"error", "error_type"}, "/v1/messages": {"type", "error"}}.get(dialect.path, {"error"})
    assert body.keys() == keys
    assert isinstance(found, str) == (dialect.path in ("/", "/api/chat", "/api/generate"))
    if dialect.path == "/v1/messages":
        assert found["type"] == ANTHROPICS.get(reply.status_code, "invalid_request_error")
    message = found if isinstance(found, str) else found["message"]
    assert len(message) > 20
    return str(message)


def events(text: str) -> list[Any]:
    """Return the one answer, or all parts of a stream."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith(("{", "[")) and line != "[DONE]"]


def answer(client: FlaskClient, dialect: Dialect, fields: Body | None = None, **asked: Any) -> Answer:
    reply = post(client, dialect, fields, **asked)
    assert reply.status_code == 200, reply.text
    return dialect.read(events(reply.text))

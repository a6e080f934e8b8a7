"""One table for all dialects: they say the same of the same answer, whole and in a stream, each in its own words."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from calls import Talk, engine_of
from dialects import (
    CALLS,
    CHATS,
    CHOOSING,
    EVERY,
    PARIS,
    SCHEMA,
    TOOLS,
    UNENFORCEABLE,
    WRITTEN,
    Answer,
    Asked,
    Dialect,
    answer,
    events,
    every_dialect,
    post,
    refused,
)
from flask import Flask
from flask.testing import FlaskClient

from api import streaming
from app import create_app
from config import Config
from models.text.tokenizer import Tokenizer
from serving import headroom
from tests.support import wait_until
from tests.support.fakes import FakeModel, FakeTokenizer, fake_engine, places_taken

every_chat = pytest.mark.parametrize("dialect", CHATS, ids=lambda dialect: dialect.path)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# ---------------------------------------------------------------- a model that says a, b, c, ...


@both_ways
@every_dialect
def test_an_answer_ends_by_its_limit_its_stop_or_itself(
    client: FlaskClient, model: FakeModel, dialect: Dialect, stream: bool
) -> None:
    assert answer(client, dialect, stream=stream, limit=3) == Answer("abc", dialect.reasons[0], 3)
    found = answer(client, dialect, stream=stream, limit=20, stop=["zz", "de"])
    assert found == Answer("abcde" if dialect.keeps_stop else "abc", dialect.reasons[1], 5)
    model.says = [97, 256]
    assert answer(client, dialect, stream=stream, limit=20) == Answer("a", dialect.reasons[2], 2)


@both_ways
@every_dialect
def test_what_cannot_be_is_refused_before_anything_is_computed(
    client: FlaskClient, model: FakeModel, dialect: Dialect, stream: bool
) -> None:
    bad = [{"limit": "many"}, {"limit": 9999}, {"prompt": "x" * 5000}, {"stop": [""]}, {"stop": ["x"] * 17}]
    for asked in bad[2:] if dialect.path == "/v1/messages" else bad:  # where a limit may be larger than the context
        reply = post(client, dialect, stream=stream, **asked)
        assert (reply.status_code, reply.mimetype) == (dialect.bad, "application/json"), asked
    if dialect.path not in ("/", "/inference"):  # which name no model
        assert post(client, dialect, stream=stream, model="gpt-5").status_code == 404
        assert post(client, dialect, stream=stream, model="fake", limit=1).status_code == 200
        model.plans -= 1
    assert model.plans == 0


@pytest.mark.parametrize("says", ["a😀é漢b", "abc", "a😀é漢b" * 3])
@every_dialect
def test_a_stream_says_what_is_said_at_once(client: FlaskClient, model: FakeModel, dialect: Dialect, says: str) -> None:
    model.says = list(says.encode())
    for limit in (1, 3, 4, len(model.says), len(model.says) + 1):
        want = FakeTokenizer().decode((model.says * 2)[:limit])
        found = [answer(client, dialect, stream=stream, limit=limit) for stream in (False, True)]
        assert [(one.text, one.tokens) for one in found] == [(want, limit)] * 2


@every_dialect
def test_no_part_of_a_stop_leaks(client: FlaskClient, model: FakeModel, dialect: Dialect) -> None:
    model.says = list(b"one two stopped")
    model.before = lambda plan: time.sleep(0.003)
    stopped = "one two stopp" if dialect.keeps_stop else "one two "
    assert answer(client, dialect, stream=True, limit=90, stop=["stopp", "xx"]).text == stopped
    assert answer(client, dialect, stream=True, limit=14, stop=["stopping"]).text == "one two stoppe"


@every_dialect
def test_a_step_that_fails_is_an_error_also_at_the_end_of_a_stream(
    client: FlaskClient, model: FakeModel, dialect: Dialect
) -> None:
    def fail(plan: Any) -> None:
        if len(plan.sequences[0].output_ids) == 3:
            raise RuntimeError("broken")

    model.before = fail
    assert post(client, dialect).status_code == dialect.broken
    reply = post(client, dialect, stream=True)
    assert reply.status_code == 200
    assert dialect.failure(events(reply.text)[-1])
    assert "[DONE]" not in reply.text
    ends = ('"done":true', "message_stop", "message_delta", "response.completed", '"generated_text":"')
    assert not any(end in reply.text for end in ends)


@every_dialect
def test_who_leaves_a_stream_frees_its_place(app: Flask, model: FakeModel, dialect: Dialect) -> None:
    go = threading.Event()
    model.before = lambda plan: len(plan.sequences[0].output_ids) == 1 and not go.wait(60) and None
    reply = post(app.test_client(), dialect, stream=True)
    assert next(reply.iter_encoded())
    assert places_taken(app) == 1
    reply.close()
    go.set()
    wait_until(lambda: (places_taken(app), engine_of(app).manager.running) == (0, 0))


@every_dialect
def test_who_finds_no_place_or_no_model_is_told_when_to_come_again(model: FakeModel, dialect: Dialect) -> None:
    loading = create_app(Config())
    engine = fake_engine(model, max_queue=1, max_batch_size=1)
    while engine.manager.inbox.places.lend() is not None:
        pass
    apps = {name: create_app(Config(overload_status=name), engine) for name in ("429", "503")}
    for app, status, word in (
        (loading, dialect.full, "loading"), (apps["429"], 429, "--max-queue"), (apps["503"], dialect.full, "--max-queue"),
    ):  # fmt: skip
        reply = post(app.test_client(), dialect)
        assert word in refused(reply, dialect, status)
        assert int(reply.headers["Retry-After"]) >= 1
    engine.manager.stop()


@every_dialect
def test_silence_is_filled_with_what_no_reader_sees(
    client: FlaskClient, model: FakeModel, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SILENCE", 0.03)
    go = threading.Event()
    model.before = lambda plan: len(plan.sequences[0].output_ids) == 2 and not go.wait(60) and None
    text, silent = "", 0
    for frame in post(client, dialect, limit=6, stream=True).iter_encoded():
        text += frame.decode()
        silent += frame.isspace() or frame.startswith(b":") or b"event: ping" in frame
        if silent == 3:
            go.set()
    assert go.is_set()
    assert dialect.read(events(text)).text == "abcdef"


@every_dialect
def test_a_process_without_memory_refuses_and_computes_nothing(
    client: FlaskClient, model: FakeModel, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headroom, "HEADROOM", 1 << 60)
    monkeypatch.setattr(headroom, "LASTING", 0.0)  # a test before may just have got its memory
    assert post(client, dialect).status_code == dialect.full
    assert model.plans == 0


# ---------------------------------------------------------------- a model with a template, tools and thoughts


@every_chat
def test_calls_are_apart_from_the_text_and_whole_in_a_stream(talk: Talk, dialect: Dialect) -> None:
    talk.says("Wait." + WRITTEN)
    found = [answer(talk.client, dialect, stream=stream, tools=TOOLS) for stream in (False, True)]
    for one in found:
        assert (one.text, one.calls, one.reason) == ("Wait.", CALLS, dialect.called)
    assert len({id for one in found for id in one.ids}) == 4
    talk.says("Hello.")
    found = [answer(talk.client, dialect, stream=stream, tools=TOOLS) for stream in (False, True)]
    assert {(one.text, one.calls, one.reason) for one in found} == {("Hello.", (), dialect.reasons[2])}


@both_ways
@every_chat
def test_without_tools_what_looks_like_a_call_is_text(talk: Talk, forms: Any, dialect: Dialect, stream: bool) -> None:
    talk.says(WRITTEN)
    for asked in ({}, *([{"tools": TOOLS, "choice": "none"}] if dialect in CHOOSING else ())):
        found = answer(talk.client, dialect, dialect.silent, stream=stream, **asked)
        assert (found.text, found.calls, found.reason) == (WRITTEN, (), dialect.reasons[2])
    assert forms == []


@both_ways
@every_chat
def test_thoughts_are_apart_from_text_and_calls_and_can_be_turned_off(
    talk: Talk, dialect: Dialect, stream: bool
) -> None:
    for text, said, calls in (("Yes.", "Yes.", ()), ("I look.\n" + WRITTEN, "I look.", CALLS)):
        talk.says("<think>\nIs it?\n</think>\n\n" + text)
        found = answer(talk.client, dialect, dialect.think, stream=stream, tools=TOOLS if calls else ())
        assert (found.thought, found.text, found.calls) == ("Is it?", said, calls)
        assert found.tokens == len(talk.model.says)
        assert not talk.prompts[-1].endswith("</think>\n\n")
    talk.says("Yes.")
    assert answer(talk.client, dialect, dialect.silent, stream=stream).text == "Yes."
    assert talk.prompts[-1].endswith("</think>\n\n")


@every_chat
def test_the_model_sees_tools_calls_and_results(talk: Talk, dialect: Dialect) -> None:
    answer(talk.client, dialect, tools=TOOLS, history=True, limit=1)
    for part in ('"enum": ["Paris"]', WRITTEN.partition("\n<tool_call>")[0], "<tool_response>\nrain\n"):
        assert part in talk.prompts[-1]
    if dialect in CHOOSING:
        answer(talk.client, dialect, tools=TOOLS, history=True, limit=1, choice="none")
        assert '"enum": ["Paris"]' not in talk.prompts[-1]


@pytest.mark.parametrize(
    ("choice", "names", "has_text", "several"),
    [("auto", 2, True, True), ("required", 2, False, True), ("now", 1, False, False)],
)
@pytest.mark.parametrize("dialect", CHOOSING, ids=lambda dialect: dialect.path)
def test_a_choice_decides_what_an_answer_may_be(
    talk: Talk, forms: Any, dialect: Dialect, choice: str, names: int, has_text: bool, several: bool
) -> None:
    answer(talk.client, dialect, tools=TOOLS, choice=choice, limit=1)
    source = forms[0].form.source
    assert ("answer: TEXT |" in source, "call){0," in source) == (has_text, several)
    assert source.count('{\\"name\\": ') == names


def fits(asked: Any, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text is a whole answer."""
    matcher = asked.compiled.start()
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


UNKNOWN = {"type": "object", "propertyNames": {"type": "string"}, "properties": {
    "city": {"type": "string", "not": {"const": "Rome"}}, "at": {"type": "string", "format": "color"},
    "code": {"type": "string", "pattern": "^(?!_)[a-z]+$"}, "zip": {"type": "integer", "oneOf": [{"minimum": 1}, {"minimum": 2}]}}}  # fmt: skip


def with_tool(dialect: Dialect, name: str, schema: Any, **more: Any) -> Any:
    body = dialect.body(Asked(tools=[(name, schema)]))
    (tool,) = body["tools"]
    tool.get("function", tool).update(more)
    return {"stream": False} | {name: value for name, value in body.items() if value not in (None, (), "auto")}


@every_chat
def test_keywords_that_cannot_be_enforced_are_left_out_and_named(talk: Talk, forms: Any, dialect: Dialect) -> None:
    reply = talk.client.post(dialect.path, json=with_tool(dialect, "weather", UNKNOWN))
    assert reply.status_code == 200, reply.text
    places = [f"properties/{place}" for place in ("city/not", "at/format", "code/pattern", "zip/oneOf")]
    named = ", ".join(f"tool-weather#/{place}" for place in ("propertyNames", *places))
    assert reply.headers["X-Ignored-Params"] == named
    call = WRITTEN.partition("\n<tool_call>")[0]
    assert [fits(forms[-1], talk.tokenizer, text) for text in (call, call.replace('"Paris"', "5"))] == [True, False]
    refused = talk.client.post(dialect.path, json=with_tool(dialect, "weather", UNKNOWN, strict=True))
    assert refused.status_code == 400
    assert "tool-weather#/propertyNames" in refused.text


@every_chat
def test_tools_that_are_no_functions_are_left_out_and_named(talk: Talk, forms: Any, dialect: Dialect) -> None:
    fields = with_tool(dialect, "now", {"type": "object", "properties": {}})
    own = fields["tools"]
    others = [{"type": "web_search"}, {"type": "namespace", "name": "helpers", "tools": own}]
    reply = talk.client.post(dialect.path, json=fields | {"tools": [others[0], *own, others[1]]})
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Ignored-Params"] == "tools.web_search, tools.helpers"
    assert [*forms[-1].form.parts] == ["tool-now"]
    assert talk.client.post(dialect.path, json=fields | {"tools": others}).status_code == 200
    if dialect in CHOOSING:
        must = dialect.body(Asked(choice="required"))["tool_choice"]
        assert talk.client.post(dialect.path, json=fields | {"tools": others, "tool_choice": must}).status_code == 400


# ---------------------------------------------------------------- a mock model, which keeps to forms


FORMED = pytest.mark.parametrize("dialect", [d for d in EVERY if d.form], ids=lambda dialect: dialect.path)


@both_ways
@FORMED
def test_an_answer_has_the_form_that_is_asked(mock: FlaskClient, dialect: Dialect, stream: bool) -> None:
    found = answer(mock, dialect, stream=stream, form=SCHEMA)
    assert (json.loads(found.text), found.reason) == (PARIS, dialect.reasons[2])


@both_ways
@FORMED
def test_a_form_that_cannot_be_enforced_is_refused_by_its_field(
    mock: FlaskClient, dialect: Dialect, stream: bool
) -> None:
    reply = post(mock, dialect, stream=stream, form=UNENFORCEABLE)
    assert reply.status_code == dialect.bad
    assert dialect.form in reply.text


@both_ways
@pytest.mark.parametrize("dialect", CHOOSING, ids=lambda dialect: dialect.path)
def test_a_tool_that_must_be_called_is_called_as_its_schema_says(
    mock: FlaskClient, dialect: Dialect, stream: bool
) -> None:
    found = answer(mock, dialect, stream=stream, tools=TOOLS, choice="weather")
    assert (found.calls, found.reason) == ((("weather", PARIS),), dialect.called)


@every_chat
def test_a_mock_model_calls_a_tool_until_it_has_the_result(mock: FlaskClient, dialect: Dialect) -> None:
    assert answer(mock, dialect, tools=TOOLS).calls
    found = answer(mock, dialect, tools=TOOLS, history=True, limit=8)
    assert found.text
    assert not found.calls

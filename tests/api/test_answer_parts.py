"""How the text of an answer is taken apart: the same parts, however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate

from api.answer_parts import AnswerParts, Piece
from models.text.tool_format import FREE, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat, format_of
from tests.support.grammars import CITY, SPECIAL, THINK, THOUGHT, drawn, written

FORMS = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)
NAMES = ("f", "f2", "get.weather")
Part = tuple[str, str]


def joined(pieces: list[Piece]) -> list[Part]:
    """Return the parts with their whole texts, calls with their places."""
    parts: list[tuple[str, Any]] = []
    for kind, text, call, id in pieces:
        where = call if kind in ("call", "arguments") else None
        assert (kind == "call") == bool(id)
        assert text
        if parts and kind != "call" and parts[-1][0] == (kind, where):
            parts[-1] = ((kind, where), parts[-1][1] + text)
        else:
            parts.append(((kind, where), text))
    return [(f"{kind}{'' if where is None else where}", text) for (kind, where), text in parts]


def parts_of(
    form: ToolFormat, text: str, cuts: list[int] | None = None, names: Any = NAMES, thinking: str = "maybe"
) -> list[Part]:
    taker = AnswerParts(form, names, thinking)
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts or ()), len(text)]
    pieces = [piece for start, end in zip([0, *ends], ends) for piece in taker.feed(text[start:end])]
    return joined(pieces + taker.feed("", ended=True))


texts = st.text(st.sampled_from('a <{[\n"\\'), max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.text(st.sampled_from('a"\\{}[]</'), max_size=6)),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(texts, v, max_size=2),
    max_leaves=4,
)
calls = st.tuples(st.sampled_from(NAMES), st.dictionaries(texts, values, max_size=2).map(json.dumps))


@given(st.data(), st.sampled_from(FORMS), texts, texts, st.lists(calls, max_size=3), st.booleans(), st.integers(0, 5))
def test_every_cut_gives_the_parts_of_the_whole(
    data: st.DataObject, form: ToolFormat, thought: str, content: str, called: list[Part], ends: bool, lost: int
) -> None:
    if not form.marker:
        called, content = called[:1], "" if called else content
    text = content + written(form, *called)
    text = f"<think>{thought}</think>{text}" if ends else text
    whole = parts_of(form, text)
    expected: list[Part] = [("reasoning", thought.strip())] if ends else []
    shown = content.rstrip() if called else content
    expected.append(("content", shown.lstrip() if ends else shown))
    for i, (name, arguments) in enumerate(called):
        expected += [(f"call{i}", name), (f"arguments{i}", arguments)]
    assert whole == [part for part in expected if part[1]]
    text = text[: len(text) - lost]  # as max_tokens does
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=12))
    assert parts_of(form, text, cuts) == parts_of(form, text) == parts_of(form, text, [*range(len(text))])


@pytest.mark.parametrize(("text", "thinking", "parts"), [
    ("Hm</think>\n\nHi\n", "open", [("reasoning", "Hm"), ("content", "Hi\n")]),
    (" \n<think>\nHm\n</think>\n\n", "maybe", [("reasoning", "Hm")]),
    ("<think>Hm ", "maybe", [("reasoning", "Hm ")]),
    ("<think>Hm</think>", "none", [("content", "<think>Hm</think>")]),
    ("<thi", "maybe", [("content", "<thi")]),
    ("I look.\n<tool_ca", "none", [("content", "I look.\n<tool_ca")]),
    ("I look.\n<tool_call>\n{\"na", "none", [("content", "I look.")]),
    ('<tool_call>\n{"name": "f', "none", []),
    ('<tool_call>\n{"name": "f", "arguments": {"a', "none", [("call0", "f"), ("arguments0", '{"a')]),
])  # fmt: skip
def test_half_an_answer_has_the_parts_that_it_has(text: str, thinking: str, parts: list[Part]) -> None:
    assert parts_of(HERMES, text, thinking=thinking) == parts


def test_a_text_that_only_looks_like_a_call_is_text() -> None:
    looks = ('{"name": "Bob", "age": 5}', '{"name": "f", "age": 5}', '{"nam": 1}', ' {"name": "f", "parameters": {}}')
    for text in looks:
        assert parts_of(LLAMA3, text) == [("content", text)]
    call = written(HERMES, ("f", "{}"))
    assert parts_of(HERMES, call, names=()) == [("content", call)]


def test_an_answer_has_called_once_its_last_call_is_whole() -> None:
    taker = AnswerParts(HERMES, NAMES, "none")
    assert not taker.feed('<tool_call>\n{"name": "f", "arguments"')
    assert not taker.has_called
    assert (taker.feed(": {")[0].kind, taker.has_called) == ("call", False)
    taker.feed("}}\n")
    assert taker.has_called


def test_calls_have_ids_of_their_own() -> None:
    two = written(HERMES, ("f", "{}"), ("f", "{}"))
    ids = [piece.id for taker in (AnswerParts(HERMES, NAMES, "none"), AnswerParts(HERMES, NAMES, "none"))
           for piece in taker.feed(two) if piece.id]  # fmt: skip
    assert len(ids) == len(set(ids)) == 4


SPECIAL_FORMS = (
    format_of("[TOOL_CALLS]", (), SPECIAL),
    format_of("</think>", (), {"<think>": THINK, "</think>": THOUGHT}),
)
SCHEMAS = {"weather": json.loads(CITY), "now": {"type": "object", "maxProperties": 0}}


@pytest.mark.parametrize("text", [FREE, None, f"%json {CITY}"], ids=["text", "required", "form"])
@pytest.mark.parametrize("thinking", ["none", "maybe", "open"])
@pytest.mark.parametrize("form", [*FORMS, *SPECIAL_FORMS], ids=lambda form: form.opening)
def test_whatever_the_grammar_lets_pass_has_calls_that_validate(
    form: ToolFormat, thinking: Any, text: str | None
) -> None:
    rng, grammar = random.Random(5), form.grammar({"weather": f"%json {CITY}", "now": None}, text, thinking)
    for answer in filter(None, (drawn(grammar, rng) for _ in range(4))):
        parts = dict(parts_of(form, answer, names=SCHEMAS, thinking=thinking))
        called = [name for name in parts if name.startswith("call")]
        for name in called:
            validate(json.loads(parts[name.replace("call", "arguments")]), SCHEMAS[parts[name]])
        content = parts.get("content", "")
        if text is None:
            assert called
            assert not content
        elif text == FREE:
            assert not form.marker or form.marker not in content
        elif not called:
            validate(json.loads(content), SCHEMAS["weather"])

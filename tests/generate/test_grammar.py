"""Forms: what is accepted, what is refused with which reason, and that an answer's place in one depends on its ids alone."""

from __future__ import annotations

import functools
import json
import threading
import time
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest

from generate.constraint import Constraint, fill
from generate.grammar import LARGEST_SOURCE, MOST_KEPT, FormError, Grammars
from models.sources.resolved import BARD
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_files import from_folder
from tests.support.schemas import CASES, REFUSED

# The library of the check refuses the zone of a time, which RFC 3339 demands.
FORMATS = jsonschema.FormatChecker(jsonschema.FormatChecker.checkers.keys() - {"time"})


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(from_folder(BARD))


def nested(keyword: str, depth: int) -> Any:
    """Return a schema within schemas."""
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {keyword: schema}
    return schema


@functools.cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), tokenizer().vocab_size)


def start(kind: Any, source: Any, parts: Any = MappingProxyType({})) -> Constraint:
    return Constraint(grammars().compile(kind, source, parts))


def accepts(constraint: Constraint, text: str) -> bool:
    try:
        return constraint.at(tokenizer().encode(text)).is_accepting()
    except FormError:
        return False


def allowed(constraint: Constraint, ids: list[int]) -> set[int]:
    masks = fill([constraint], [ids])
    assert not masks.errors
    return {token for token, is_set in enumerate(masks.allowed(0, tokenizer().vocab_size)) if is_set}


@pytest.mark.parametrize("name", CASES)
def test_schema_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    case = CASES[name]
    grammar = grammars().compile("json", case.schema)
    validator = jsonschema.Draft202012Validator(case.schema, format_checker=FORMATS)
    for value in case.valid:
        assert validator.is_valid(value), value
        assert accepts(Constraint(grammar), json.dumps(value, ensure_ascii=False)), value
    for value in case.invalid:
        assert not accepts(Constraint(grammar), json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("name", REFUSED)
def test_schema_that_cannot_be_enforced_is_refused_by_keyword_and_path(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(FormError) as caught:
        grammars().compile("json", schema)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("choice", ["yes", "no", 'may "be"\n'], ["yes", 'may "be"\n'], ["maybe", "yesno", ""]),
        ("regex", r"\d{3}-\d{4}", ["555-0123"], ["555-012", "5550123", "555-01234"]),
        ("regex", r"https?://[a-z]+/", ["http://a/"], ["http:/a/"]),
        ("lark", 'start: "a" n\nn: /[0-9]+/', ["a1"], ["a", "1"]),
        ("lark", 'root ::= "a" | "b" root', ["a", "bba"], ["b", "ab"]),
    ],
)
def test_other_kinds_of_forms(kind: str, source: Any, good: list[str], bad: list[str]) -> None:
    assert all(accepts(start(kind, source), text) for text in good)
    assert not any(accepts(start(kind, source), text) for text in bad)


def test_a_grammar_may_name_other_forms() -> None:
    form = "lark", 'start: "<" @a ">" @b', {"a": ("json", {"type": "integer"}), "b": ("choice", ["x", "y"])}
    assert accepts(start(*form), "<12>y")
    assert not accepts(start(*form), "<12>z")


def test_white_space_is_bounded() -> None:
    constraint = start("json", CASES["closed"].schema)
    assert accepts(constraint, '{"a": "x", "b": 1}')
    assert not accepts(constraint, '{"a":  "x", "b": 1}')
    assert not accepts(constraint, '{\n"a": "x", "b": 1}')


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "((x{1000}){1000}){100}", "too large"),
        ("lark", "start: missing", "missing"),
        ("lark", "root ::= (", "GBNF"),
        ("lark", "root ::= " + "(" * 5000, "GBNF"),
        ("regex", "a" * (LARGEST_SOURCE + 1), f"at most {LARGEST_SOURCE:,}"),
        ("json", {"enum": [f"value {i}" for i in range(20_000)]}, f"at most {LARGEST_SOURCE:,}"),
        ("json", nested("items", 900), "nested"),
    ],
)
def test_hostile_forms_are_refused_soon(kind: Any, source: Any, reason: str) -> None:
    before = grammars().counts["refused"]
    began = time.thread_time()
    with pytest.raises(FormError, match=reason):
        grammars().compile(kind, source)
    assert time.thread_time() - began < 5
    assert grammars().counts["refused"] == before + 1


@pytest.mark.parametrize("form", [
    ("json", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
    ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(7500)) + 'r7500: "x"'),
])  # fmt: skip
def test_a_deep_form_does_not_overflow_the_stack_of_a_handler(form: tuple[Any, Any]) -> None:
    ended: list[str] = []

    def handle() -> None:
        try:
            grammars().compile(*form).start()
            ended.append("kept")
        except FormError as error:
            ended.append(error.reason)

    before = threading.stack_size(512 * 1024)  # as launch/gunicorn_conf.py has it for handlers
    try:
        thread = threading.Thread(target=handle)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert len(ended) == 1  # an overflow would have ended the process


def test_as_many_forms_are_kept_as_the_bound_says() -> None:
    own = Grammars(tokenizer(), tokenizer().vocab_size)
    for i in range(MOST_KEPT + 10):
        own.compile("regex", f"a{{{i + 1}}}")
    assert len(own) == MOST_KEPT
    own.compile("regex", f"a{{{MOST_KEPT + 10}}}")
    assert own.counts == {"compiled": MOST_KEPT + 10, "cached": 1}


def test_large_forms_are_kept_as_long_as_there_is_room_for_their_sources() -> None:
    own = Grammars(tokenizer(), tokenizer().vocab_size)
    for i in range(60):
        own.compile("json", {"enum": [f"{i:02}_{j:04}" for j in range(4000)]})
    assert 20 < len(own) < 60


def test_a_place_depends_on_the_ids_alone() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    text, other = tokenizer().encode("[12, 345, 6]"), tokenizer().encode("[9, 8]")
    constraint = start("json", schema)
    for ids in (text, text[:3], other, [], text[:5], other[:2], text):
        assert allowed(constraint, ids) == allowed(start("json", schema), ids)


def test_ids_that_are_not_of_the_form_are_an_error_from_which_others_recover() -> None:
    constraint = start("regex", "[0-9]+")
    with pytest.raises(FormError, match="after 1 token"):
        constraint.at(tokenizer().encode("1x"))
    assert accepts(constraint, "12")


def test_an_ambiguous_form_ends_before_it_makes_steps_slow() -> None:
    ambiguous = start("lark", 'start: e\ne: e e | "a" | e e e | e e e e')
    answers = (tokenizer().encode("a") * count for count in range(0, 2000, 6))
    with pytest.raises(FormError, match="ambiguous"):
        list(map(ambiguous.at, answers))


def test_masks_behind_drafts_are_those_of_steps_of_their_own() -> None:
    schema = CASES["closed"].schema
    ids = tokenizer().encode('{"a": "xyz", "b": 12}')
    drafted = start("json", schema)
    masks = fill([drafted] * len(ids), [ids[:n] for n in range(len(ids))])
    for n in range(len(ids)):
        assert set(masks.allowed(n, tokenizer().vocab_size).nonzero()[0]) == allowed(start("json", schema), ids[:n])
    wrong = [*ids[:2], ids[0]]
    masks = fill([drafted, drafted, start("regex", "a")], [wrong[:2], wrong, []])
    assert not masks.errors
    assert masks.bits[1].all()  # behind a draft that is not of the form, everything may follow
    assert allowed(start("regex", "a"), []) == set(masks.allowed(2, tokenizer().vocab_size).nonzero()[0])


def test_forms_are_equal_by_their_source() -> None:
    one, same, other = start("regex", "a"), start("regex", "a"), start("regex", "b")
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "a"


def test_forced_tokens_are_the_text_that_the_form_leaves() -> None:
    constraint = start("json", CASES["closed"].schema)
    ids = constraint.forced([])
    assert tokenizer().decode(ids).startswith('{"a": ')
    assert constraint.forced(tokenizer().encode('{"a": "x')) == []
    assert start("regex", "a").forced(tokenizer().encode("b")) == []


# Not of a word that may stand anywhere: it looks no further than the next token.
@pytest.mark.parametrize("name", [name for name in CASES if name != "pattern anywhere"])
def test_a_model_without_weights_writes_a_short_valid_text(name: str) -> None:
    *ids, end = grammars().compile("json", CASES[name].schema).short_text
    assert end in tokenizer().eos_ids
    assert len(ids) < 1000
    assert accepts(start("json", CASES[name].schema), tokenizer().decode(ids))
    jsonschema.validate(json.loads(tokenizer().decode(ids)), CASES[name].schema)


def test_a_short_text_fills_strings_with_a_word_and_ends_an_array_of_objects() -> None:
    text = {"type": "string"}
    item = {"type": "object", "properties": {"a": text, "b": {**text, "minLength": 1}}, "required": ["a", "b"]}
    properties = {"path": text, "edits": {"type": "array", "items": item, "minItems": 1}, "more": text}
    schema = {"type": "object", "properties": properties, "required": ["path", "edits"]}
    *ids, _ = grammars().compile("json", schema).short_text
    assert json.loads(tokenizer().decode(ids)) == {"path": "word", "edits": [{"a": "word", "b": "word"}]}


def test_a_short_text_gets_out_of_repetitions() -> None:
    for regex in (r"[a-z]+@[a-z]+\.com", "(a|b)*c"):
        *ids, _ = grammars().compile("regex", regex).short_text
        assert accepts(start("regex", regex), tokenizer().decode(ids))
        assert len(ids) < 20

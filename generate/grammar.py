"""Forms of answers, compiled by llguidance: JSON schemas, choices, regular expressions and grammars.

A form is enforced as a whole or refused, by a reason that a user can act on. It must not know HTTP, queues or tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, Literal

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from generate.short_text import bits_of, short_text

Kind = Literal["json", "choice", "regex", "lark"]
Parts = Mapping[str, tuple[Kind, Any]]
NO_PARTS: Parts = {}
ANSWER = "answer"  # the name of the whole form
MOST_KEPT, MOST_CHARACTERS = 256, 1 << 21  # forms, and their sources together: some 60 MB
LARGEST_SOURCE = 1 << 17  # characters
MOST_SECONDS = 0.5  # of a processor, to compile a form and to find its first tokens
# The compiler recurses over rules and properties, and an overflow would end the process. 64 MB hold the deepest form of
# LARGEST_SOURCE; that of an HTTP handler overflows at some 1,500 properties. A stack takes memory only where it is used.
COMPILER_STACK = 128 << 20  # bytes
# What a step may cost, and what a form may hold in memory: about 5 ms, and 10 MB for each answer. Without
# `precompute_large_lexemes`, the default, one repetition can take minutes.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=150_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=10_000,
    max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip
# White space as models write it: without a bound they go on with it for ever. The others must not be turned off by a schema.
JSON_OPTIONS = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False, "coerce_one_of": False,
}  # fmt: skip
PROBED = 4  # tokens
# Formats that describe a number or say what a text is for, and do not limit it (OpenAPI, pydantic).
ANNOTATIONS = frozenset({"int32", "int64", "float", "double", "binary", "byte", "password", "path", "file-path"})
DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})  # keywords whose values are not schemas
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # objects whose keys are not keywords
FORMATS = ANNOTATIONS | {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
UNKNOWN = frozenset({  # keywords that llguidance lacks, and oneOf, whose members it must be able to tell apart
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "oneOf", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
})  # fmt: skip
QUOTED = frozenset({"pattern", "$ref", "format", "type"})  # keywords whose value an error of llguidance names
REASONS = {  # by how an error of llguidance begins
    "recursion limit": "it is nested too deeply",
    "Unimplemented keys": "it is not supported",
    "oneOf constraints": "its members overlap, or cannot be told apart. Use anyOf",
    "NoExtension": "no text satisfies it",
    "initial lexer configuration": "its texts and patterns are too large together",
    "lexer error": "it is too large, or repeats too much",
    "Parser Error: Current row": "it has too many alternatives at one place",
    "schema too large": "its alternatives multiply to too many",
}


class FormError(ValueError):
    """A form that cannot be enforced, or that an answer cannot go on with; `reason` may be shown to clients."""

    @property
    def reason(self) -> str:
        """The reason, as a clause of a message to a client."""
        return str(self)


class Grammar:
    """A compiled form, equal to others of the same source, which has so many characters."""

    def __init__(self, key: bytes, characters: int, matcher: llguidance.LLMatcher, grammars: Grammars) -> None:
        self.key, self.characters, self.grammars = key, characters, grammars
        self.left_out: list[str] = []  # paths of keywords that it does not enforce
        self._matcher = matcher

    def start(self) -> llguidance.LLMatcher:
        """Return a matcher at the beginning; it takes 10 us."""
        return self._matcher.deep_copy()

    @functools.cached_property
    def short_text(self) -> list[int]:
        """A short text of this form, with the token that ends it: for models without weights."""
        return short_text(self.start(), self.grammars.tokenizer)


class Grammars:
    """Compiles forms for one tokenizer, in any thread, and keeps the last ones."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.counts: Counter[str] = Counter()  # of calls: compiled, cached, refused
        self._tokenizer = llguidance.LLTokenizer(
            _Wrapped(tokenizer, vocabulary),  # type: ignore[arg-type]  # by what it has, not by its class
            n_vocab=vocabulary,
            eos_token=list(tokenizer.eos_ids),
        )
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()
        self._characters = 0  # of those
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        """Return the number of forms that it keeps."""
        return len(self._known)

    def compile(self, kind: Kind, source: Any, parts: Parts = NO_PARTS, loose: Collection[str] = ()) -> Grammar:
        """Return a compiled form; a Lark grammar may name other forms, its `parts`, as `@name`.

        The schemas of `loose` parts lose keywords that llguidance does not know. One that still fails becomes any object.

        It takes about `MOST_SECONDS` of a processor at most, four times that with loose parts, and does not hold the
        interpreter. Raises FormError, which names the keyword of a schema and its path.
        """
        try:
            text = json.dumps([kind, source, dict(parts), [*loose]])
            key = hashlib.sha256(text.encode()).digest()
            with self._lock:
                known = self._known.get(key)
                if known is not None:
                    self._known.move_to_end(key)
                    self.counts["cached"] += 1
                    return known
            if len(text) > LARGEST_SOURCE:
                raise FormError(f"it has {len(text):,} characters, but may have at most {LARGEST_SOURCE:,}")
            loosened = {name: _without(parts[name][1], _is_unknown, name) for name in loose if name in parts}
            forms = (
                {ANSWER: (kind, source)} | dict(parts) | {name: ("json", each[0]) for name, each in loosened.items()}
            )
            with self._compiling:  # one at a time: the engine needs the processors, too
                matcher, any_object = self._compile_deep(forms, [*loosened])
            grammar = Grammar(key, len(text), matcher, self)
            for name, (_, paths) in loosened.items():
                grammar.left_out += [f"{name}#"] if name in any_object else paths
        except (FormError, RecursionError) as error:
            self.counts["refused"] += 1
            raise error if isinstance(error, FormError) else FormError("it is nested too deeply") from None
        with self._lock:
            self.counts["compiled"] += 1
            self._known[key] = grammar
            self._characters += grammar.characters
            while len(self._known) > MOST_KEPT or self._characters > MOST_CHARACTERS:
                self._characters -= self._known.popitem(last=False)[1].characters
        return grammar

    def _compile_deep(self, forms: Parts, loose: Sequence[str]) -> tuple[llguidance.LLMatcher, Collection[str]]:
        """Compile in a thread of its own, with a stack for the deepest form."""
        pool, before = ThreadPoolExecutor(1), threading.stack_size(COMPILER_STACK)
        try:
            future = pool.submit(self._compile_loosely, forms, loose)
        finally:
            threading.stack_size(before)
        with pool:
            return future.result()

    def _compile_loosely(self, forms: Parts, loose: Sequence[str]) -> tuple[llguidance.LLMatcher, Collection[str]]:
        """Compile, with any object for each loose schema that fails alone, or for all if none does; also return their names."""
        try:
            return self._compile(forms), ()
        except FormError:
            if not loose:
                raise
        failed, end = [*loose], time.thread_time() + MOST_SECONDS
        for name in loose:
            with suppress(FormError):
                if time.thread_time() < end:
                    self._compile({ANSWER: forms[name]})
                    failed.remove(name)
        objects: Parts = dict.fromkeys(failed or loose, ("json", {"type": "object"}))
        return self._compile({**forms, **objects}), objects

    def _compile(self, forms: Parts) -> llguidance.LLMatcher:
        began = time.thread_time()
        grammars = [{"name": name, **_form(kind, source)} for name, (kind, source) in forms.items()]
        matcher = llguidance.LLMatcher(self._tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=LIMITS)
        # Only the first tokens show what some forms cost, and that some allow nothing.
        after = matcher.deep_copy()
        for _ in range(PROBED):
            if not after.is_stopped():  # as it is after an error, too
                after.consume_token(int(np.unpackbits(bits_of(after), bitorder="little").argmax()))
        if after.is_error():
            raise FormError(_reason(after.get_error(), forms))
        seconds = time.thread_time() - began
        if seconds > MOST_SECONDS:
            raise FormError(f"it takes {seconds:.2f} s to compile, but may take at most {MOST_SECONDS:g} s")
        return matcher


class _Wrapped:
    """A tokenizer as llguidance wants it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = next(iter(tokenizer.bos_ids), None)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.vocabulary.encode_rest or tokenizer.vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        ids: list[int] = self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
        return ids


def _form(kind: Kind, source: Any) -> dict[str, Any]:
    """Return a form as llguidance takes it."""
    if kind == "json":
        return {"json_schema": json_schema(source)}
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, source))}
    if kind == "regex":
        grammar: dict[str, Any] = json.loads(llguidance.LLMatcher.grammar_from_regex(source))["grammars"][0]
        return {"lark_grammar": grammar["lark_grammar"]}
    if "::=" not in source:
        return {"lark_grammar": source}
    try:
        return {"lark_grammar": gbnf_to_lark(source)}
    except (ValueError, RecursionError, LookupError, GbnfToLarkError) as error:
        raise FormError(f"it is not GBNF: {str(error)[:200]}") from error


def json_schema(schema: Any) -> dict[str, Any]:
    """Return a schema that llguidance enforces as a whole: what a model is told to write is what a validator accepts."""
    known, _ = _without(schema, lambda name, value: name == "format" and str(value) in ANNOTATIONS)
    if known is False:
        raise FormError("it is false, so that nothing would be valid")
    return {**({} if known is True else known), "x-guidance": JSON_OPTIONS}


def _without(schema: Any, unwanted: Callable[[str, Any], bool], title: str = "") -> tuple[Any, list[str]]:
    """Return a copy of a schema without some keywords, with `anyOf` for `oneOf`, and the paths of these keywords."""
    copy, paths = json.loads(json.dumps(schema)), []
    for path, name, value, owner in [*_keywords(copy, f"{title}#")]:
        if unwanted(name, value):
            paths.append(path)
            del owner[name]
            if name == "oneOf":
                owner.setdefault("anyOf", value)
    return copy, paths


def _is_unknown(name: str, value: Any) -> bool:
    if name == "pattern":
        return re.search(r"\(\?<?[=!]", str(value)) is not None  # look-around
    return name in UNKNOWN or (name == "format" and str(value) not in FORMATS)


def _reason(error: str, forms: Parts) -> str:
    """Return llguidance's reason as a clause, with the path of the keyword in a schema that it speaks of."""
    lines = [line.strip() for line in error.splitlines()]
    reason = " ".join(line for line in lines if not re.match(r"$|<non-verbose/>|\^+$|\d+ \|", line))[:300]
    if forms[ANSWER][0] != "lark":  # the place is in a grammar that the user never saw
        reason = re.sub(r"^at \d+\(\d+\): ", "", reason)
    reason = next((text for begin, text in REASONS.items() if reason.startswith(begin)), reason)
    words = {*re.findall(r"[$\w]+", error)}
    schemas = [
        _keywords(source, "#" if name == ANSWER else f"{name}#")
        for name, (kind, source) in forms.items()
        if kind == "json"
    ]
    for path, key, value, _ in chain.from_iterable(schemas):
        if (key in words and not isinstance(value, str)) or (
            key in QUOTED and isinstance(value, str) and value in error
        ):
            return f"{key} at {path}: {reason}"
    return reason


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yield path, name and value of each keyword of a schema, and the object that has it."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from _keywords(item, f"{path}/{i}")
    elif isinstance(schema, dict):
        for name, value in schema.items():
            yield f"{path}/{name}", name, value, schema
            if name in NAMED and isinstance(value, dict):
                for key, inner in value.items():
                    yield from _keywords(inner, f"{path}/{name}/{key}")
            elif name not in DATA:
                yield from _keywords(value, f"{path}/{name}")

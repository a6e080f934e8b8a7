"""Answers of a given form: a JSON schema, a choice, a regular expression or a grammar, compiled by llguidance.

What may follow is a function of the form and of the answer's token ids alone: a `Constraint` remembers how far it has read,
and goes back where the ids differ. So an answer that is preempted, retried or has drafts needs nothing of its own. It must
not know HTTP, queues, policies or tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any, Literal, NamedTuple

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from numpy.typing import NDArray

from generate.cores import cores

Kind = Literal["json", "choice", "regex", "lark"]
NO_PARTS: Mapping[str, tuple[Kind, Any]] = {}
ANSWER = "answer"  # the name of the whole form
MOST_CACHED = 256  # forms
LARGEST_SOURCE = 1 << 17  # characters
MOST_SECONDS = 0.5  # of a processor, to compile a form and to find its first tokens
# What a step may cost, and what a form may hold in memory: about 5 ms, and 10 MB for each answer. Without
# `precompute_large_lexemes`, the default, one repetition can take minutes.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=50_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=10_000,
    max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip
# White space as models write it: without a bound they go on with it for ever. The others must not be turned off by a schema.
JSON_OPTIONS = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False, "coerce_one_of": False,
}  # fmt: skip
# The bytes that a short text prefers, in this order.
CLOSING = b'"}])>,:;@./_ =' + bytes(range(48, 58)) + b"-+" + bytes(range(65, 256)) + bytes(range(65))
LONGEST_SHORT = 4096  # tokens
PROBED = 4  # tokens
# Formats that describe a number or say what a text is for, and do not limit it (OpenAPI, pydantic).
ANNOTATIONS = frozenset({"int32", "int64", "float", "double", "binary", "byte", "password", "path", "file-path"})
DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})  # keywords whose values are not schemas
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # objects whose keys are not keywords
QUOTED = frozenset({"pattern", "$ref", "format", "type"})  # keywords whose value an error of llguidance names
REASONS = {  # by how an error of llguidance begins
    "Unimplemented keys": "it is not supported",
    "oneOf constraints": "its members overlap, or cannot be told apart. Use anyOf",
    "NoExtension": "no text satisfies it",
}


class FormError(ValueError):
    """A form that cannot be enforced, or that an answer cannot go on with; `reason` may be shown to clients."""

    @property
    def reason(self) -> str:
        """What is wrong."""
        return str(self)


class Grammar:
    """A compiled form, equal to others of the same source."""

    def __init__(self, key: bytes, matcher: llguidance.LLMatcher, grammars: Grammars) -> None:
        self.key, self.grammars = key, grammars
        self._matcher = matcher

    def start(self) -> llguidance.LLMatcher:
        """Return a matcher at the beginning; it takes 10 us."""
        return self._matcher.deep_copy()

    @functools.cached_property
    def short_text(self) -> list[int]:
        """A short text of this form, with the token that ends it: for models without weights."""
        return self.grammars.shortest(self.start())


class Grammars:
    """Compiles forms for one tokenizer, in any thread, and keeps the last ones."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.counts: Counter[str] = Counter()  # of calls: compiled, cached, refused
        self._tokenizer = llguidance.LLTokenizer(
            _Wrapped(tokenizer, vocabulary),  # type: ignore[arg-type]  # by what it has, not by its class
            n_vocab=vocabulary,
            eos_token=list(tokenizer.eos_ids),
        )
        bytes_of = {tokenizer.token_bytes(token): token for token in range(min(vocabulary, tokenizer.vocab_size))}
        singles = [bytes_of[byte] for byte in map(bytes, zip(CLOSING)) if byte in bytes_of]
        self._ends = frozenset(tokenizer.eos_ids)
        self._closing = list(dict.fromkeys([*tokenizer.eos_ids, *singles]))
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()
        self._lock, self._compiling = Lock(), Lock()

    def __len__(self) -> int:
        """Return the number of forms that it keeps."""
        return len(self._known)

    def shortest(self, matcher: llguidance.LLMatcher) -> list[int]:
        """Return a short text from the matcher's place to the end of its form, as ids with the one that ends it."""
        ids: list[int] = []
        seen = set()  # masks
        taken: Counter[tuple[bytes, int]] = Counter()  # tokens, by the mask before them
        while len(ids) < LONGEST_SHORT and not matcher.is_error():
            if forced := matcher.compute_ff_tokens():
                matcher.consume_tokens(forced)
                ids += forced
                continue
            bits = _bits(matcher)
            mask, allowed = bits.tobytes(), np.unpackbits(bits, bitorder="little")
            candidates = [token for token in self._closing if allowed[token]] or [int(allowed.argmax())]
            if candidates[0] in self._ends:
                return [*ids, candidates[0]]
            seen.add(mask)
            # One that ends the text; or leads to a new place; or, as several places may have one mask, is taken least often.
            after = {token: matcher.deep_copy() for token in candidates}
            possible = [token for token in candidates if after[token].consume_token(token)]
            ends = (token for token in possible if after[token].is_accepting())
            leads_on = (token for token in possible if _bits(after[token]).tobytes() not in seen)
            token = next(ends, None) or next(leads_on, None) or min(possible, key=lambda token: taken[mask, token])
            taken[mask, token] += 1
            ids.append(token)
            matcher = after[token]
        return ids

    def compile(self, kind: Kind, source: Any, parts: Mapping[str, tuple[Kind, Any]] = NO_PARTS) -> Grammar:
        """Return a compiled form; a Lark grammar may name other forms, its `parts`, as `@name`.

        It takes no longer than `MOST_SECONDS` of a processor and does not hold the interpreter. Raises FormError, which names
        the keyword of a schema and its path.
        """
        try:
            text = json.dumps([kind, source, dict(parts)])
            key = hashlib.sha256(text.encode()).digest()
            with self._lock:
                known = self._known.get(key)
                if known is not None:
                    self._known.move_to_end(key)
                    self.counts["cached"] += 1
                    return known
            if len(text) > LARGEST_SOURCE:
                raise FormError(f"it has {len(text):,} characters, but may have at most {LARGEST_SOURCE:,}")
            with self._compiling:  # one at a time: the engine needs the processors, too
                grammar = Grammar(key, self._compile({ANSWER: (kind, source), **parts}), self)
        except (FormError, RecursionError) as error:
            self.counts["refused"] += 1
            raise error if isinstance(error, FormError) else FormError("it is nested too deeply") from None
        with self._lock:
            self.counts["compiled"] += 1
            self._known[key] = grammar
            if len(self._known) > MOST_CACHED:
                self._known.popitem(last=False)
        return grammar

    def _compile(self, forms: Mapping[str, tuple[Kind, Any]]) -> llguidance.LLMatcher:
        began = time.thread_time()
        grammars = [{"name": name, **_form(kind, source)} for name, (kind, source) in forms.items()]
        matcher = llguidance.LLMatcher(self._tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=LIMITS)
        # Only the first tokens show what some forms cost, and that some allow nothing.
        after = matcher.deep_copy()
        for _ in range(PROBED):
            if not after.is_stopped():  # as it is after an error, too
                after.consume_token(int(np.unpackbits(_bits(after), bitorder="little").argmax()))
        if after.is_error():
            raise FormError(_reason(after.get_error(), forms))
        seconds = time.thread_time() - began
        if seconds > MOST_SECONDS:
            raise FormError(f"it takes {seconds:.2f} s to compile, but may take at most {MOST_SECONDS:g} s")
        return matcher


class Constraint:
    """A form, and how far one answer is in it; equal to others of the same form."""

    __slots__ = ("_ids", "_matcher", "grammar")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._matcher = grammar.start()
        self._ids: list[int] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constraint) and other.grammar.key == self.grammar.key

    def __hash__(self) -> int:
        return hash(self.grammar.key)

    def at(self, ids: Sequence[int]) -> llguidance.LLMatcher:
        """Return the matcher after these tokens. Raises FormError if they are not of this form, or it became too complex."""
        known, same = self._ids, min(len(self._ids), len(ids))
        if known[:same] != ids[:same]:
            same = next(i for i in range(same) if known[i] != ids[i])
        if same < len(known) and (self._matcher.is_error() or not self._matcher.rollback(len(known) - same)):
            self._matcher, same = self.grammar.start(), 0
        rest = list(ids[same:])
        read = self._matcher.try_consume_tokens(rest) if rest else 0
        self._ids = [*ids[: same + read]]
        if read < len(rest) or self._matcher.is_error():
            raise self.error()
        return self._matcher

    def error(self) -> FormError:
        """Return why nothing may follow."""
        reason = self._matcher.get_error().partition("\n")[0] or "no token can follow"
        return FormError(f"its form cannot go on after {len(self._ids):,} tokens: {reason[:200]}")

    def forced(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that most likely follow these, since the form leaves no other text."""
        try:
            matcher = self.at(ids)
        except FormError:  # which the step will find, too
            return []
        return [] if matcher.is_stopped() else matcher.compute_ff_tokens()


class Masks(NamedTuple):
    """Which tokens may follow: a bit for each token of the vocabulary, (rows, words); and the rows where none can be found."""

    bits: NDArray[np.int32]
    errors: dict[int, FormError]

    def allowed(self, row: int, vocabulary: int) -> NDArray[np.bool_]:
        """Return one row, unpacked: bool (vocabulary)."""
        return np.unpackbits(self.bits[row].view(np.uint8), bitorder="little")[:vocabulary].astype(np.bool_)


class Stopwatch:
    """Adds up the seconds that the engine's thread waits for masks."""

    seconds = 0.0

    def take(self) -> float:
        """Return them, and begin anew."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


filling = Stopwatch()


def fill(constraints: Sequence[Constraint], histories: Sequence[Sequence[int]]) -> Masks:
    """Return the masks after each of these answers, (ids), in parallel and without the interpreter.

    Answers of the same constraint follow each other, each with one draft token more. Behind a wrong draft all may follow:
    such a row does not count.
    """
    began = time.perf_counter()
    words = -(-constraints[0].grammar.grammars.vocabulary // 32)
    masks = Masks(np.full((len(constraints), words), -1, np.int32), {})
    jobs: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
    members: list[tuple[int, Constraint]] = []
    for row, (constraint, ids) in enumerate(zip(constraints, histories)):
        if row and constraint is constraints[row - 1]:
            if members and members[-1][1] is constraint:
                jobs[-1][2].append(ids[-1])
            continue
        try:
            jobs.append((constraint.at(ids), row, []))
            members.append((row, constraint))
        except FormError as error:
            masks.errors[row] = error
    where = masks.bits.ctypes.data, words * 4, len(constraints)
    if plain := [(matcher, row) for matcher, row, drafts in jobs if not drafts]:
        executor().unsafe_compute_mask_ptr(plain, *where)
    if drafted := [job for job in jobs if job[2]]:
        executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
    for row, constraint in members:
        if constraint._matcher.is_error():
            masks.errors[row] = constraint.error()
    filling.seconds += time.perf_counter() - began
    return masks


@functools.cache
def executor() -> llguidance.LLExecutor:
    """Return the threads that fill masks."""
    return llguidance.LLExecutor(cores())


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


def _bits(matcher: llguidance.LLMatcher) -> NDArray[np.uint8]:
    return np.frombuffer(matcher.compute_bitmask(), np.uint8)


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
    known: Any = _without_annotations(schema)
    if known is False:
        raise FormError("it is false, so that nothing would be valid")
    return {**({} if known is True else known), "x-guidance": JSON_OPTIONS}


def _without_annotations(schema: Any) -> Any:
    """Return a copy of a schema without the formats that do not limit a value."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in DATA else _without_annotations(value)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value in ANNOTATIONS)
    }


def _reason(error: str, forms: Mapping[str, tuple[Kind, Any]]) -> str:
    """Return llguidance's reason as a clause, with the path of the keyword in a schema that it speaks of."""
    lines = [line.strip() for line in error.splitlines()]
    reason = " ".join(line for line in lines if not re.match(r"$|<non-verbose/>|\^+$|\d+ \|", line))[:300]
    reason = next((text for begin, text in REASONS.items() if reason.startswith(begin)), reason)
    words = {*re.findall(r"[$\w]+", error)}
    schemas = [
        _keywords(source, "#" if name == ANSWER else f"{name}#")
        for name, (kind, source) in forms.items()
        if kind == "json"
    ]
    for path, key, value in chain.from_iterable(schemas):
        if (key in words and not isinstance(value, str)) or (
            key in QUOTED and isinstance(value, str) and value in error
        ):
            return f"{key} at {path}: {reason}"
    return reason


def _keywords(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of each keyword of a schema."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from _keywords(item, f"{path}/{i}")
    elif isinstance(schema, dict):
        for name, value in schema.items():
            yield f"{path}/{name}", name, value
            if name in NAMED and isinstance(value, dict):
                for key, inner in value.items():
                    yield from _keywords(inner, f"{path}/{name}/{key}")
            elif name not in DATA:
                yield from _keywords(value, f"{path}/{name}")

"""Which texts a grammar lets pass, by llguidance with a token for each byte."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import llguidance

from models.text.tool_format import ToolFormat

EOS, MARKER, ARGS, THINK, THOUGHT = 256, 257, 258, 259, 260
SPECIAL = {"[TOOL_CALLS]": MARKER, "[ARGS]": ARGS}
CITY = json.dumps(
    {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    }
)  # fmt: skip


class Bytes:
    """A byte is a token, as llguidance wants its tokenizers."""

    is_tokenizer_wrapper = True
    tokens = [bytes([i]) for i in range(256)] + [
        b"<eos>",
        *(text.encode() for text in (*SPECIAL, "<think>", "</think>")),
    ]
    eos_token_id, bos_token_id = EOS, None
    special_token_ids = [*range(EOS, len(tokens))]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def wrapped() -> Any:
    return llguidance.LLTokenizer(Bytes(), n_vocab=len(Bytes.tokens), eos_token=EOS)


def checker(grammar: str) -> Callable[[str], str]:
    """Return what says of a text whether it is whole, begins an answer ("open"), or is refused.

    The texts of special tokens are those tokens where they stand in ‹›.
    """

    def check(text: str) -> str:
        matcher = llguidance.LLMatcher(wrapped(), grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        for i, part in enumerate(text.replace("›", "‹").split("‹")):
            ids += [Bytes.tokens.index(part.encode())] if i % 2 else list(part.encode())
        if matcher.try_consume_tokens(ids) < len(ids):
            return "refused"
        return "whole" if matcher.is_accepting() else "open"

    return check


def drawn(grammar: str, rng: random.Random, most: int = 400) -> str | None:
    """Return a random answer of a grammar, of the bytes that end things rather often; None if it does not end."""
    matcher = llguidance.LLMatcher(wrapped(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < most:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(Bytes.tokens)) if mask[i // 8] >> (i % 8) & 1]
        ending = [i for i in allowed if i >= EOS or chr(i) in '"}>/<{[']
        shown = [i for i in allowed if i >= EOS or 32 <= i < 127]
        token = rng.choice(ending if ending and rng.random() < 0.6 else shown or allowed)
        if token == EOS:
            return b"".join(map(Bytes.tokens.__getitem__, ids)).decode("utf-8", "replace")
        assert matcher.consume_token(token)
        ids.append(token)
    return b"".join(map(Bytes.tokens.__getitem__, ids)).decode("utf-8", "replace") if matcher.is_stopped() else None


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """Return calls as the form writes them."""
    each = [form.head + name + form.middle + arguments for name, arguments in calls]
    return form.marker + form.begin + (form.tail + form.between).join(each) + form.tail + form.end if calls else ""

"""From the text of a request to the token ids of a prompt that fits the context together with its answer.

This module must not know the wire format of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from api.http import errors, large
from api.http.errors import ApiError
from api.service import LoadedEngine


class Prompt(NamedTuple):
    """A prompt as text and as ids."""

    text: str
    ids: list[int]


def encode(
    engine: LoadedEngine,
    text: str,
    *,
    special: bool,
    keep: int | None = None,
    param: str = "prompt",
    begins: bool = True,
) -> list[int]:
    """Return the token ids of a text, or the last `keep` of them; raise ApiError if it is too long for the context.

    With `special`, <|endoftext|> becomes the special token. With `begins`, the ids that begin a prompt come first.
    """
    if keep is None:
        check_size(engine, [text], param)
    with tokenizing(len(text), param):
        text.encode("utf-8")
        ids = engine.tokenizer.encode(text, "special" if special else "text")
    ids = [*engine.tokenizer.bos_ids, *ids] if begins else ids
    return ids if keep is None else ids[-keep:]


def check_size(engine: LoadedEngine, texts: Iterable[str], param: str) -> None:
    """Raise ApiError for texts with more bytes than the context can have."""
    most = engine.context * engine.tokenizer.longest_token
    size = sum([len(text.encode("utf-8", "replace")) for text in texts])
    if size > most:
        raise ApiError(
            f"{param} has {size:,} bytes, but a context of {engine.context:,} tokens holds at most {most:,}. "
            f"Shorten the {'prompt' if param == 'prompt' else param}",
            param=param, code="context_length_exceeded",
        )  # fmt: skip


@contextmanager
def tokenizing(characters: int, param: str) -> Iterator[None]:
    """Run a block that tokenizes a text of this many characters; its ValueError becomes an ApiError."""
    try:
        with large.serialize_large(characters):
            yield
    except ValueError as error:
        raise ApiError(f"{param} cannot be tokenized: {str(error)[:400]}", param=param) from None


def check_ids(engine: LoadedEngine, ids: Sequence[int], param: str) -> None:
    """Raise ApiError for an id outside the model's vocabulary."""
    size = engine.vocabulary
    bad = next((token for token in ids if not 0 <= token < size), None)
    if bad is not None:
        raise ApiError(
            f"{param} has the token id {errors.shown(bad)}, but the model has {size:,} tokens. Use ids from 0 to "
            f"{size - 1}", param=param,
        )  # fmt: skip


def resolve_max_tokens(
    engine: LoadedEngine, prompt: Prompt, max_tokens: int | None, name: str, prompt_name: str
) -> int:
    """Return the number of tokens to generate; raise ApiError if prompt and answer exceed the context.

    `name` and `prompt_name` are the fields of the request that set the limit and the prompt.
    """
    room, needed = engine.context - len(prompt.ids), 1 if max_tokens is None else max_tokens
    if needed <= room:
        return room if max_tokens is None else max_tokens
    it = "the prompt" if prompt_name == "prompt" else prompt_name
    number = f"{needed:,}" if needed < 10**18 else errors.shown(needed)
    if max_tokens and room > 0:
        remedy = f"Shorten {it} or request at most {room:,} tokens"
    elif needed < engine.context:
        remedy = f"Shorten {it} to at most {engine.context - needed:,} tokens"
    else:
        remedy = f"Shorten {it} to at most {engine.context - 1:,} tokens, and request fewer tokens"
    raise ApiError(
        f"{prompt_name} has {len(prompt.ids):,} token{'' if len(prompt.ids) == 1 else 's'} and "
        f"{'the answer needs at least 1' if max_tokens is None else f'{name} is {number}'}; their sum must be at most "
        f"{engine.context:,}. {remedy}", param=name if max_tokens and room > 0 else prompt_name, code="context_length_exceeded",
    )  # fmt: skip

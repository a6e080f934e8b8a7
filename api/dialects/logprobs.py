"""Tokens and their log probabilities as the dialects write them.

A token's text is what it adds to the text before it: nothing while a character is unfinished. This module must not know
how an answer is sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from api.service import Tokenizer


class Pieces:
    """Finds what each token adds to a text; the pieces join to it, except for a character that is never finished."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Return what the next token adds."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's own text, or `bytes:\\xNN` for one that is not valid UTF-8 by itself."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Scored(NamedTuple):
    """A token and its score, which is None for the first token of a prompt."""

    token: int
    detail: Any


class Logprobs:
    """Builds OpenAI's logprobs object of one text, in one piece or in several that continue each other.

    `offset` is the position of the first token in characters, and `most` the number of alternatives to a token.
    `hidden` ids have entries, but no part in the text. A token that is not in the text is where it would be.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, most: int, hidden: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._most = most
        self._hidden = hidden
        self._pieces = Pieces(tokenizer)

    def write(self, scored: Sequence[Scored], end: int | None = None) -> dict[str, list[Any]]:
        """Return the object for the next tokens; `end` is where the text ends, as soon as that is known."""
        offsets = []
        for token, _ in scored:
            offsets.append(max(0, self._offset if end is None else min(self._offset, end)))
            if token not in self._hidden:
                self._offset += len(self._pieces.add(token))
        return {
            "tokens": [token_name(self._tokenizer, token) for token, _ in scored],
            "token_logprobs": [d and d.logprob for _, d in scored],
            "top_logprobs": [self._top(token, d) for token, d in scored],
            "text_offset": offsets,
        }

    def _top(self, token: int, detail: Any) -> dict[str, float] | None:
        if detail is None:
            return None
        names: dict[str, float] = {}
        for id, value in (*detail.top[: self._most], (token, detail.logprob)):
            names.setdefault(token_name(self._tokenizer, id), value)
        return names


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[Scored], most: int) -> dict[str, Any]:
    """Return the logprobs object of a chat for these tokens, each with `most` alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_name(tokenizer, token), "logprob": logprob, "bytes": list(data)}

    content = [
        entry(token, detail.logprob) | {"top_logprobs": [entry(*top) for top in detail.top[:most]]}
        for token, detail in scored
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], details: Sequence[Any], most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return a prompt's scores in vLLM's form: each token with `most` alternatives by id, null for the first."""

    def score(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.decode([token])}

    def scores(token: int, detail: Any) -> dict[str, dict[str, Any]]:
        by_id = {str(token): score(token, detail.logprob, detail.rank)}
        for rank, (id, logprob) in enumerate(detail.top[:most], 1):
            by_id[str(id)] = score(id, logprob, rank)
        return by_id

    return [detail and scores(token, detail) for token, detail in prompt_scores(ids, details)]


def prompt_scores(ids: Sequence[int], details: Sequence[Any]) -> list[Scored]:
    """Return a prompt's tokens with their scores; the first has none."""
    return [Scored(token, detail) for token, detail in zip(ids, (None, *details))]

"""Text to token ids and back: POST /tokenize in vLLM's and TGI's form, POST /detokenize.

A large body takes a place in the queue, as a generating request does, and a large answer is written in parts, so that
neither keeps the interpreter from running streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any, ClassVar

from flask import Response, request
from pydantic import BaseModel, ConfigDict, Field, StrictStr

from api.dialects.chat import prompt_of
from api.generation import check_model, ready_engine
from api.hooks import admission
from api.http import parts
from api.http.errors import ApiError
from api.http.openapi import Routes, TypedDict
from api.prompts import check_ids, encode
from api.schemas import body
from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.openai import MESSAGES, Messages
from api.service import Service, Tokenizer
from observe.feed import dumps

EXAMPLE = '{"prompt": "ROMEO:"}'
SMALL = 1 << 14  # bytes of a body that needs no place in the queue
TOKENS, CHARACTERS = 256, 1 << 14  # written at once


class TokenizeRequest(u.Refusing):
    """A text to tokenize: vLLM's form has `prompt` or `messages`, TGI's has `inputs`."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {name: {"type": "null"} for name in ("prompt", "messages", "inputs")}}, "then": False
        }
    )  # fmt: skip
    unsupported: ClassVar = u.TOKENIZE

    model: f.Name | None = Field(None, description=f.MODEL)
    prompt: StrictStr | None = Field(None, description="a string")
    messages: Messages | None = Field(None, description=MESSAGES)
    inputs: StrictStr | None = Field(None, description="a string")
    add_generation_prompt: f.Flag = Field(True, description=f.FLAG)
    add_special_tokens: f.Flag = Field(True, description=f.FLAG)


class DetokenizeRequest(BaseModel):
    """Token ids to convert to text."""

    model: f.Name | None = Field(None, description=f.MODEL)
    tokens: f.Ids = Field(description="a list of token ids")


Tokenized = TypedDict("Tokenized", {"count": int, "max_model_len": int, "tokens": list[int]})
TokenPiece = TypedDict("TokenPiece", {"id": int, "text": str, "start": int, "stop": int})
Detokenized = TypedDict("Detokenized", {"prompt": str})


def routes_of(service: Service) -> Routes:
    """Return the routes."""
    routes = Routes("tokens", "tokens")

    @routes.post(
        "/tokenize", "the token ids of a string, or of a chat: prompt or messages for vLLM's API, inputs for TGI's",
        body=TokenizeRequest, example={"prompt": "ROMEO:"}, answer=Tokenized | list[TokenPiece], errors=(404, 429, 503),
    )  # fmt: skip
    def tokenize() -> Response:
        engine = ready_engine(service)
        admit(service)
        params, ignored = body.validate(TokenizeRequest, body.take(request, EXAMPLE))
        check_model(engine, params.model)
        given = [name for name in ("prompt", "messages", "inputs") if getattr(params, name) is not None]
        if not given:
            raise ApiError(
                "either prompt, messages or inputs is required. Send prompt or messages for vLLM's answer format, or "
                "inputs for TGI's", param="prompt",
            )  # fmt: skip
        ignored += given[1:]
        sent = getattr(params, given[0])
        if given[0] == "messages":
            ids = prompt_of(engine, sent, answers=params.add_generation_prompt).ids
        else:
            ids = encode(engine, sent, special=engine.special_end, param=given[0], begins=params.add_special_tokens)
        if given[0] == "inputs":
            content = chain("[", parts.items(pieces(engine.tokenizer, sent, ids), TOKENS), "]")
        else:
            head = f'{{"count":{len(ids)},"max_model_len":{engine.context},"tokens":['
            content = chain([head], parts.items(ids, TOKENS), ["]}"])
        return body.name_ignored(parts.response(content), ignored)

    @routes.post(
        "/detokenize", "the text that token ids stand for", body=DetokenizeRequest, example={"tokens": [1, 2, 3]},
        answer=Detokenized, errors=(404, 429, 503),
    )  # fmt: skip
    def detokenize() -> Response:
        engine = ready_engine(service)
        admit(service)
        params, ignored = body.validate(DetokenizeRequest, body.take(request, '{"tokens": [1, 2]}'))
        check_model(engine, params.model)
        check_ids(engine, params.tokens, "tokens")
        text = engine.tokenizer.decode(params.tokens, begins=True)
        cuts = range(0, len(text), CHARACTERS)
        content = chain(['{"prompt":"'], (dumps(text[i : i + CHARACTERS])[1:-1] for i in cuts), ['"}'])
        return body.name_ignored(parts.response(content), ignored)

    return routes


def admit(service: Service) -> None:
    """Take a place in the queue for a request whose body is large or has no Content-Length."""
    length = request.content_length
    if length is None or length > SMALL:
        admission.enter(service)


def pieces(tokenizer: Tokenizer, text: str, ids: list[int]) -> Iterator[dict[str, Any]]:
    """Yield TGI's form: each token with the characters start..stop that contain it.

    Where the tokenizer has changed the text, as by normalizing it, the characters are of the changed text.
    """
    first = next((i for i, token in enumerate(ids) if token not in tokenizer.bos_ids), len(ids))
    for token in ids[:first]:
        yield {"id": token, "text": tokenizer.decode([token]), "start": 0, "stop": 0}
    ids = ids[first:]
    if tokenizer.decode_bytes(ids) != text.encode():
        text = tokenizer.decode(ids)
    ends = accumulate(len(character.encode()) for character in text)  # in bytes
    character, character_end, end = -1, 0, 0
    for token in ids:
        if end == character_end:
            character, character_end = character + 1, next(ends, character_end)
        start = character
        end += len(tokenizer.token_bytes(token))
        while character_end < end:
            character, character_end = character + 1, next(ends, end)
        stop = character + 1
        yield {"id": token, "text": text[start:stop], "start": start, "stop": stop}

"""Text to token ids and back: POST /tokenize in vLLM's and TGI's form, POST /detokenize.

A large body takes a place in the queue, as a request that generates does, and a large answer is written in parts, so
that neither keeps the interpreter from the streams that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any

from flask import Blueprint, Response, request

from api import generation
from api.http import admission, body, parts
from api.http.errors import ApiError
from api.http.openapi import Operation
from api.schemas import DetokenizeRequest, TokenizeRequest
from api.service import Service, Tokenizer
from observe.feed import dumps

EXAMPLE = '{"prompt": "ROMEO:"}'
SMALL = 1 << 14  # bytes of a body that needs no place
TOKENS, LETTERS = 256, 1 << 14  # that are written at once
OPERATIONS = [
    Operation(
        "post", "/tokenize", "the token ids of a string: prompt for vLLM's API, inputs for TGI's", "tokens",
        body=TokenizeRequest, example={"prompt": "ROMEO:"}, answer={"type": ["object", "array"]},
        errors=(400, 404, 413, 415, 429, 503),
    ),
    Operation(
        "post", "/detokenize", "the text that token ids stand for", "tokens", body=DetokenizeRequest, example={"tokens": [1, 2, 3]},
        answer={"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
        errors=(400, 404, 413, 415, 429, 503),
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tokens", __name__)

    @routes.post("/tokenize")
    def tokenize() -> Response:
        engine = generation.ready_engine(service)
        admit(service)
        asked, ignored = body.validate(TokenizeRequest, body.take(request, EXAMPLE))
        generation.check_model(engine, asked.model)
        if asked.prompt is None and asked.inputs is None:
            raise ApiError(
                "either prompt or inputs is required. Send prompt for vLLM's answer format, or inputs for TGI's",
                param="prompt",
            )
        name = "inputs" if asked.prompt is None else "prompt"
        text = asked.inputs if asked.prompt is None else asked.prompt
        assert text is not None
        ids = generation.encode(engine, text, special=engine.special_end, param=name)
        if name == "inputs":
            written = chain("[", parts.listed(pieces(engine.tokenizer, text, ids), TOKENS), "]")
        else:
            head = f'{{"count":{len(ids)},"max_model_len":{engine.context},"tokens":['
            written = chain([head], parts.listed(ids, TOKENS), ["]}"])
            if asked.inputs is not None:
                ignored.append("inputs")
        return body.name_ignored(parts.response(written, len(ids) > TOKENS), ignored)

    @routes.post("/detokenize")
    def detokenize() -> Response:
        engine = generation.ready_engine(service)
        admit(service)
        asked, ignored = body.validate(DetokenizeRequest, body.take(request, '{"tokens": [1, 2]}'))
        generation.check_model(engine, asked.model)
        generation.check_ids(engine, asked.tokens, "tokens")
        text = engine.tokenizer.decode(asked.tokens)
        cuts = range(0, len(text), LETTERS)
        written = chain(['{"prompt":"'], (dumps(text[i : i + LETTERS])[1:-1] for i in cuts), ['"}'])
        return body.name_ignored(parts.response(written, len(text) > LETTERS), ignored)

    return routes


def admit(service: Service) -> None:
    """Take a place for a request whose body is large, or of a length that it does not say."""
    length = request.content_length
    if length is None or length > SMALL:
        admission.enter(service)


def pieces(tokenizer: Tokenizer, text: str, ids: list[int]) -> Iterator[dict[str, Any]]:
    """Yield TGI's form: each token with the characters start..stop that it touches."""
    ends = accumulate(len(character.encode()) for character in text)  # in bytes
    character, character_end, end = -1, 0, 0
    for token in ids:
        if end == character_end:
            character, character_end = character + 1, next(ends)
        start = character
        end += len(tokenizer.token_bytes(token))
        while character_end < end:
            character, character_end = character + 1, next(ends)
        stop = character + 1
        yield {"id": token, "text": text[start:stop], "start": start, "stop": stop}

"""Text to token ids and back: POST /tokenize in vLLM's and TGI's form, POST /detokenize."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify, request

from api import body, generation
from api.errors import ApiError
from api.openapi import Operation
from api.schemas import DetokenizeRequest, TokenizeRequest
from api.service import Service, Tokenizer

EXAMPLE = '{"prompt": "ROMEO:"}'
OPERATIONS = [
    Operation(
        "post", "/tokenize", "the token ids of a text: of a prompt as vLLM, of inputs as TGI", "tokens",
        body=TokenizeRequest, example={"prompt": "ROMEO:"}, answer={"type": ["object", "array"]},
        errors=(400, 404, 413, 415, 503),
    ),
    Operation(
        "post", "/detokenize", "the text of token ids", "tokens", body=DetokenizeRequest, example={"tokens": [1, 2, 3]},
        answer={"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
        errors=(400, 404, 413, 415, 503),
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tokens", __name__)

    @routes.post("/tokenize")
    def tokenize() -> Response:
        engine = generation.ready_engine(service)
        asked, ignored = body.validate(TokenizeRequest, body.take(request, EXAMPLE))
        generation.check_model(engine, asked.model)
        if asked.prompt is None and asked.inputs is None:
            raise ApiError(
                "one of prompt and inputs is wanted. Send prompt for vLLM's form of the answer, inputs for TGI's",
                param="prompt",
            )
        name = "inputs" if asked.prompt is None else "prompt"
        text = asked.inputs if asked.prompt is None else asked.prompt
        assert text is not None
        ids = generation.tokenize(engine, text, special=engine.special_end, param=name)
        reply: Any = {"count": len(ids), "max_model_len": engine.context, "tokens": ids}
        if name == "inputs":
            reply = pieces(engine.tokenizer, text, ids)
        elif asked.inputs is not None:
            ignored.append("inputs")
        return body.name_ignored(jsonify(reply), ignored)

    @routes.post("/detokenize")
    def detokenize() -> Response:
        engine = generation.ready_engine(service)
        asked, ignored = body.validate(DetokenizeRequest, body.take(request, '{"tokens": [1, 2]}'))
        generation.check_model(engine, asked.model)
        generation.check_ids(engine, asked.tokens, "tokens")
        return body.name_ignored(jsonify(prompt=engine.tokenizer.decode(asked.tokens)), ignored)

    return routes


def pieces(tokenizer: Tokenizer, text: str, ids: list[int]) -> list[dict[str, Any]]:
    """Return TGI's form: each token with the characters start..stop that it touches."""
    places = []  # of each byte, the character it belongs to
    for place, character in enumerate(text):
        places += [place] * len(character.encode())
    result, at = [], 0
    for token in ids:
        end = at + len(tokenizer.token_bytes(token))
        start, stop = places[at], places[end - 1] + 1
        result.append({"id": token, "text": text[start:stop], "start": start, "stop": stop})
        at = end
    return result

"""Embeddings in OpenAI's form: the pooled final states of prompts, scheduled as all prompts are. No token is drawn."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from flask import Blueprint, Response, request

from api.dialects.openai import prompts_of
from api.generation import (
    Generation,
    GenerationRequest,
    check_model,
    ignored_hints,
    ready_engine,
    reply,
    start_generation,
)
from api.hooks import admission
from api.http import parts
from api.http.errors import ApiError
from api.http.openapi import Operation
from api.prompts import Prompt
from api.schemas import body
from api.schemas.openai import EmbeddingRequest
from api.service import Engine, Service
from batching import Inference
from observe.feed import dumps

EXAMPLE = '{"input": "ROMEO:"}'
MOST_NUMBERS = 1 << 13  # written at once
OPERATIONS = [
    Operation(
        "post", "/v1/embeddings", "embed one or several prompts: vectors of length 1", "openai", body=EmbeddingRequest,
        example={"input": "ROMEO:"}, generates=True,
        answer={
            "type": "object", "required": ["object", "data", "model", "usage"],
            "properties": {"object": {"const": "list"}, "data": {"type": "array"}},
        },
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    """Return the route."""
    routes = Blueprint("embeddings", __name__)

    @routes.post("/v1/embeddings")
    def embeddings() -> Any:
        engine = ready_engine(service)
        params, ignored = body.validate(EmbeddingRequest, body.take(request, EXAMPLE))
        adapter = check_model(engine, params.model)
        if params.dimensions not in (None, engine.width):
            raise ApiError(
                f"dimensions is {params.dimensions:,}, but this model's embeddings have {engine.width:,}. Leave "
                f"dimensions out, or send {engine.width}", param="dimensions",
            )  # fmt: skip
        admission.take_more(service, len(params.input) - 1)
        prompts = prompts_of(engine, params.input, params.truncate_prompt_tokens, "input")
        check_lengths(engine, prompts)
        options = {
            "embeds": True, "pooling": params.pooling, "scores_prompt": params.pooling == "mean", "temperature": 0.0,
            "adapter": adapter, **params.scheduling_options(),
        }  # fmt: skip
        generation = start_generation(service, engine, GenerationRequest(prompts, 0, "max_tokens", "input", options))
        is_large = params.encoding_format == "float" and len(prompts) * engine.width > MOST_NUMBERS

        def write() -> Response:
            generation.wait()
            return parts.response(answer(generation, params, engine), is_large)

        return reply(generation, write, ignored + ignored_hints(engine, params), at_once=is_large)

    return routes


def check_lengths(engine: Engine, prompts: list[Prompt]) -> None:
    """Raise ApiError for a prompt that exceeds the context."""
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest > engine.context:
        raise ApiError(
            f"input has {longest:,} tokens, but the context is {engine.context:,}. Shorten the input, split it, or send "
            f"truncate_prompt_tokens to embed its end", param="input", code="context_length_exceeded",
        )  # fmt: skip


def answer(generation: Generation, params: EmbeddingRequest, engine: Engine) -> Iterator[str]:
    """Yield the body of the answer, prompt by prompt."""
    yield '{"object":"list","data":['
    for i, inference in enumerate(generation.inferences):
        item = {"object": "embedding", "index": i, "embedding": vector(inference, params.encoding_format)}
        yield "," * (i > 0) + dumps(item)
    tokens = sum(len(inference.sequence.prompt_ids) for inference in generation.inferences)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield f'],"model":{dumps(params.model or engine.served_name)},"usage":{dumps(usage)}}}\n'


def vector(inference: Inference, encoding_format: str) -> list[float] | str:
    """Return an embedding as numbers, or as base64 of little-endian float32."""
    numbers = inference.sequence.prompt_details[-1]  # those before it are sums of the prompt's beginning
    return numbers.tolist() if encoding_format == "float" else b64encode(numbers.tobytes()).decode()

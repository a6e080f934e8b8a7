"""Embeddings in OpenAI's form: the pooled final states of prompts, scheduled as all prompts are. No token is drawn."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Literal

from flask import Response, request

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
from api.http.openapi import Routes, TypedDict
from api.schemas import body
from api.schemas.openai import EmbeddingRequest
from api.service import LoadedEngine, Service
from batching import Inference
from observe.feed import dumps
from serving.adapters import Loaded

EXAMPLE = '{"input": "ROMEO:"}'
EmbeddingVector = TypedDict(
    "EmbeddingVector", {"object": Literal["embedding"], "index": int, "embedding": list[float] | str}
)
Embeddings = TypedDict("Embeddings", {
    "object": Literal["list"], "data": list[EmbeddingVector], "model": str, "usage": dict[str, int],
})  # fmt: skip


def routes_of(service: Service) -> Routes:
    """Return the route."""
    routes = Routes("embeddings", "openai")

    @routes.post(
        "/v1/embeddings", "embed one or several prompts: vectors of length 1", body=EmbeddingRequest,
        example={"input": "ROMEO:"}, answer=Embeddings, generates=True,
    )  # fmt: skip
    def embeddings() -> Any:
        engine = ready_engine(service)
        params, ignored = body.validate(EmbeddingRequest, body.take(request, EXAMPLE))
        generation = start_embedding(service, engine, params, check_model(engine, params.model))

        def write() -> Response:
            model, in_base64 = params.model or engine.served_name, params.encoding_format == "base64"
            return parts.response(written(generation.inferences, model, in_base64))

        return reply(generation, ignored + ignored_hints(engine, params), write)

    return routes


def start_embedding(
    service: Service, engine: LoadedEngine, params: EmbeddingRequest, adapter: Loaded | None
) -> Generation:
    """Put the prompts of a request into the queue, all or none."""
    options = {
        "embeds": True, "pooling": params.pooling, "scores_prompt": params.pooling == "mean", "temperature": 0.0,
        "adapter": adapter, **params.scheduling_options(request.environ),
    }  # fmt: skip
    if params.dimensions not in (None, engine.width):
        raise ApiError(
            f"dimensions is {params.dimensions:,}, but must be {engine.width}, the width of the model. Leave it out",
            param="dimensions",
        )
    admission.take_more(service, len(params.input) - 1)
    prompts = prompts_of(engine, params.input, params.truncate_prompt_tokens, "input")
    return start_generation(service, engine, GenerationRequest(prompts, 0, "max_tokens", "input", options))


def vector(inference: Inference) -> Any:
    """Return the embedding of a prompt: behind the sums of its beginning, if these were computed."""
    return inference.sequence.prompt_details[-1]


def written(inferences: list[Inference], model: str, in_base64: bool) -> Iterator[str]:
    """Yield the body of an answer, prompt by prompt; in base64 a vector is little-endian float32."""
    yield '{"object":"list","data":['
    for i, inference in enumerate(inferences):
        found = vector(inference)
        numbers = b64encode(found.tobytes()).decode() if in_base64 else found.tolist()
        yield "," * (i > 0) + dumps({"object": "embedding", "index": i, "embedding": numbers})
    tokens = sum(len(inference.sequence.prompt_ids) for inference in inferences)
    yield f'],"model":{dumps(model)},"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}\n'

"""OpenAI's dialect: completions, with vLLM's extras, the list of the one model, and vLLM's /version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from flask import Blueprint, Response, g, jsonify, request

from api import generation
from api.dialects.openai_writer import CompletionWriter
from api.generation import Generation, GenerationRequest, Prompt
from api.http import admission, body
from api.http.deferral import Deferred
from api.http.errors import ApiError
from api.http.openapi import Operation
from api.schemas import CompletionRequest
from api.schemas.openai import UNLIMITED, UNSUPPORTED_COMPLETION, Sampled
from api.service import Engine, Service
from config import VERSION

Asked = TypeVar("Asked", bound=Sampled)
EXAMPLE = '{"prompt": "ROMEO:", "max_tokens": 40}'
USAGE = {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]}
OPERATIONS = [
    Operation(
        "post", "/v1/completions", "complete one or several prompts", "openai", body=CompletionRequest,
        example={"prompt": "ROMEO:", "max_tokens": 8}, generates=True, streams=True,
        answer={
            "type": "object", "required": ["id", "object", "created", "model", "choices", "usage"],
            "properties": {"object": {"const": "text_completion"}, "choices": {"type": "array"}, "usage": USAGE},
        },
    ),
    Operation(
        "get", "/v1/models", "the served model", "openai", errors=(503,),
        answer={"type": "object", "required": ["object", "data"], "properties": {"data": {"type": "array"}}},
    ),
    Operation(
        "get", "/v1/models/{model}", "the served model, if it has this name", "openai", errors=(404, 503),
        answer={"type": "object", "required": ["id", "object", "created", "owned_by"]},
    ),
    Operation(
        "get", "/version", "the server's version", "openai",
        answer={"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}}},
    ),
]  # fmt: skip


class Writer(Protocol):
    """What writes an answer, in one piece or as it grows."""

    @property
    def is_large(self) -> bool: ...
    def whole(self) -> Response: ...
    def stream(self) -> Response: ...


@dataclass(frozen=True)
class Kind(Generic[Asked]):
    """What makes one of OpenAI's requests for text: `places` may refuse fields that do not go together."""

    schema: type[Asked]
    example: str
    unsupported: dict[str, tuple[Any, ...]]
    places: Callable[[Asked], int]
    ask: Callable[[Engine, Asked], GenerationRequest]
    writer: Callable[[Engine, Generation, Asked], Writer]


def answer(service: Service, kind: Kind[Asked]) -> Response | Deferred:
    """Check the present request, start what it asks for, and return its answer."""
    engine = generation.ready_engine(service)
    fields = body.take(request, kind.example)
    harmless = body.refuse_unsupported(fields, kind.unsupported)
    asked, ignored = body.validate(kind.schema, fields)
    generation.check_model(engine, asked.model)
    check_sampled(service, asked)
    admission.take_more(service, kind.places(asked) - 1)
    job = generation.start(service, engine, kind.ask(engine, asked), streams=asked.stream)
    writer = kind.writer(engine, job, asked)
    names = [n for n in ignored if n not in harmless] + asked.unread()
    names += generation.unheeded(engine, asked)
    if asked.stream:
        return body.name_ignored(writer.stream(), names)
    if writer.is_large:  # not in the thread that answers everybody
        return body.name_ignored(writer.whole(), names)
    return Deferred(job, lambda: body.name_ignored(writer.whole(), names))


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("openai", __name__)
    kind = Kind(CompletionRequest, EXAMPLE, UNSUPPORTED_COMPLETION, completion_places, completion_ask, CompletionWriter)

    @routes.post("/v1/completions")
    def completions() -> Response | Deferred:
        return answer(service, kind)

    @routes.get("/v1/models")
    def models() -> Response:
        return jsonify(object="list", data=[model_card(generation.ready_engine(service))])

    @routes.get("/v1/models/<path:model>")
    def model(model: str) -> Response:
        engine = generation.ready_engine(service)
        generation.check_model(engine, model)
        return jsonify(model_card(engine))

    @routes.get("/version")
    def version() -> Response:
        return jsonify(version=VERSION)

    return routes


def model_card(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.served_name,
        "object": "model",
        "created": int(engine.loaded_at),
        "owned_by": "effective-batching",
        "root": engine.served_name,
        "parent": None,
        "max_model_len": engine.context,
    }


def check_sampled(service: Service, asked: Sampled) -> None:
    """Raise ApiError for fields that do not go together; take the id that the body asks for."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(
            'stream_options requires a stream. Send "stream": true, or remove stream_options', param="stream_options"
        )
    if asked.request_id is not None and "X-Request-Id" not in request.headers:
        g.request_id = asked.request_id
        service.requests.rename(g.context, asked.request_id)


def completion_places(asked: CompletionRequest) -> int:
    """Return how many places the prompts and choices take; ApiError for fields that do not go together."""
    if asked.best_of is not None and asked.best_of < asked.n:
        raise ApiError(
            f"best_of is {asked.best_of} and n is {asked.n}, but best_of must be at least n. Raise best_of",
            param="best_of",
        )
    if asked.stream and asked.best_of is not None and asked.best_of > asked.n:
        raise ApiError(
            f"best_of is {asked.best_of} and n is {asked.n}, but a stream cannot choose among answers. "
            "Remove best_of, or do not stream", param="best_of",
        )  # fmt: skip
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(
            "max_tokens is 0, but must be at least 1 without echo. Raise max_tokens, or send echo: true",
            param="max_tokens",
        )
    if asked.max_tokens != UNLIMITED and asked.min_tokens > asked.max_tokens:
        raise too_many_at_least(asked.min_tokens, asked.max_tokens)
    return len(asked.prompt) * (asked.best_of or asked.n)


def too_many_at_least(fewest: int, most: int) -> ApiError:
    return ApiError(
        f"min_tokens is {str(fewest)[:40]} and max_tokens is {str(most)[:40]}, but min_tokens must be at most "
        "max_tokens. Lower min_tokens", param="min_tokens",
    )  # fmt: skip


def limit(asked: int | None) -> int | None:
    """Return how many tokens a request limits its answer to; None for all the room there is."""
    return None if asked == UNLIMITED else asked


def options_of(engine: Engine, asked: Sampled) -> dict[str, Any]:
    """Return the options of `make_inference` that the dialect's common fields mean."""
    generation.check_ids(engine, asked.stop_token_ids, "stop_token_ids")
    generation.check_ids(engine, list(asked.logit_bias), "logit_bias")
    return {
        "temperature": asked.temperature,
        "top_k": max(asked.top_k, 0),
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "logit_bias": tuple(asked.logit_bias.items()),
        "stops": asked.stop,
        "stop_ids": asked.stop_token_ids,
        "ignore_eos": asked.ignore_eos,
        "min_tokens": asked.min_tokens,
        "keep_stop": asked.include_stop_str_in_output,
        "hide_special": asked.skip_special_tokens,
        **asked.scheduling_options(),
    }


def completion_ask(engine: Engine, asked: CompletionRequest) -> GenerationRequest:
    options = options_of(engine, asked)
    best_of = asked.best_of or asked.n
    if asked.logprobs is not None or best_of > asked.n:
        options["logprobs"] = asked.logprobs or 0
    wanted = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    scores = max((n for n in wanted if n is not None), default=None)
    if scores is not None or asked.max_tokens == 0:
        options |= {"scores_prompt": True, "prompt_logprobs": scores}
    return GenerationRequest(
        prompts_of(engine, asked), limit(asked.max_tokens), "max_tokens", options,
        n=asked.n, best_of=best_of, seed=asked.seed, timeout_s=asked.timeout_s,
    )  # fmt: skip


def prompts_of(engine: Engine, asked: CompletionRequest) -> list[Prompt]:
    """Return the prompts as text and ids, cut to their last tokens if that is asked for."""
    keep = asked.truncate_prompt_tokens
    prompts = []
    for given in asked.prompt:
        if isinstance(given, str):
            ids = generation.encode(engine, given, special=engine.special_end, keep=keep)
            text = given if keep is None else engine.tokenizer.decode(ids)
        else:
            generation.check_ids(engine, given, "prompt")
            ids = given if keep is None else given[-keep:]
            text = engine.tokenizer.decode(ids)
        prompts.append(Prompt(text, ids))
    return prompts

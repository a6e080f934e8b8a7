"""OpenAI's dialect: completions with vLLM's extra fields, the list of the one model, and vLLM's /version."""

from __future__ import annotations

from typing import Any, Literal

from flask import Response, g, jsonify, request

from api.dialects.openai_writer import CompletionWriter, Params
from api.generation import GenerationRequest, check_model, constraint, ignored_hints, ready_engine, start_generation
from api.hooks import admission
from api.http.errors import ApiError
from api.http.openapi import Object, Routes, TypedDict
from api.http.owner import is_reserved
from api.prompts import Prompt, check_ids, encode
from api.schemas import body
from api.schemas.openai import UNLIMITED, CompletionRequest, Sampled
from api.service import LoadedEngine, Service
from config import VERSION
from serving.adapters import Entry, Loaded

EXAMPLE = '{"prompt": "ROMEO:", "max_tokens": 40}'
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # what a model's authors may recommend
Usage = TypedDict("Usage", {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int})
CompletionChoice = TypedDict("CompletionChoice", {
    "index": int, "text": str, "logprobs": Object | None, "finish_reason": str, "stop_reason": str | int | None,
})  # fmt: skip
Completion = TypedDict("Completion", {
    "id": str, "object": Literal["text_completion"], "created": int, "model": str, "choices": list[CompletionChoice],
    "usage": Usage,
})  # fmt: skip
ModelCard = TypedDict("ModelCard", {"id": str, "object": Literal["model"], "created": int, "owned_by": str})
ModelList = TypedDict("ModelList", {"object": Literal["list"], "data": list[ModelCard]})
ServerVersion = TypedDict("ServerVersion", {"version": str})


def begin(
    service: Service, schema: type[Params], example: str
) -> tuple[LoadedEngine, Params, Loaded | None, list[str]]:
    """Check the current request; return the engine, the request, its adapter, and the names of fields without effect."""
    engine = ready_engine(service)
    params, ignored = body.validate(schema, body.take(request, example))
    adapter = check_model(engine, params.model)
    check_sampled(service, params)
    read = engine.tokenizer.tool_format.variables if engine.chats else None
    ignored += ["stream_options"] if params.stream_options is not None and not params.stream else []
    return engine, params, adapter, ignored + params.ignored(read) + ignored_hints(engine, params)


def routes_of(service: Service) -> Routes:
    """Return the routes of this dialect, except chat."""
    routes = Routes("openai", "openai")

    @routes.post(
        "/v1/completions", "complete one or several prompts", body=CompletionRequest,
        example={"prompt": "ROMEO:", "max_tokens": 8}, answer=Completion, generates=True, streams=True,
    )  # fmt: skip
    def completions() -> Any:
        engine, params, adapter, ignored = begin(service, CompletionRequest, EXAMPLE)
        admission.take_more(service, completion_count(params) - 1)
        generating = completion_request(engine, params, adapter)
        generation = start_generation(service, engine, generating, streams=params.stream)
        return CompletionWriter(engine, generation, params).reply(ignored)

    @routes.get("/v1/models", "the served model", answer=ModelList, errors=(503,))
    def models() -> Response:
        engine = ready_engine(service)
        adapters = engine.adapters.entries() if engine.adapters is not None else []
        cards = [model_card(engine, name) for name in engine.names]
        return jsonify(object="list", data=[*cards, *(adapter_card(engine, entry) for entry in adapters)])

    @routes.get("/v1/models/<path:model>", "the served model, if it has this name", answer=ModelCard, errors=(404, 503))
    def model(model: str) -> Response:
        engine = ready_engine(service)
        entry = engine.adapters.find(model) if engine.adapters is not None else None
        if entry is not None:
            return jsonify(adapter_card(engine, entry))
        check_model(engine, model)
        return jsonify(model_card(engine, model))

    @routes.get("/version", "the server's version", answer=ServerVersion)
    def version() -> Response:
        return jsonify(version=VERSION)

    return routes


def model_card(engine: LoadedEngine, name: str) -> dict[str, Any]:
    """Return the entry of the served model in /v1/models, by one of its names.

    Clients of vLLM, OpenRouter and llama.cpp read the context by other names each, and guess it where theirs is missing.
    """
    whole = engine.facts.get("whole_context", engine.context)
    meta = {"n_ctx": engine.context, "n_ctx_train": whole, "n_vocab": engine.vocabulary, "n_embd": engine.width}
    return {
        "id": name,
        "object": "model",
        "created": int(engine.loaded_at),
        "owned_by": "effective-batching",
        "root": engine.served_name,
        "parent": None,
        "max_model_len": engine.context,
        "context_length": engine.context,
        "meta": meta,
    }


def adapter_card(engine: LoadedEngine, entry: Entry) -> dict[str, Any]:
    """Return the entry of an adapter in /v1/models."""
    changes = {"root": entry.name, "parent": engine.served_name, "created": int(entry.added_at)}
    return model_card(engine, entry.name) | changes


def check_sampled(service: Service, params: Sampled) -> None:
    """Raise ApiError for fields that contradict each other; adopt the request id of the body."""
    if params.request_id is not None and is_reserved(params.request_id):
        raise ApiError("request_id begins with batch_, as only lines of batches do. Use another", param="request_id")
    if params.request_id is not None and "X-Request-Id" not in request.headers:
        g.request_id = params.request_id
        service.registry.rename(g.context, params.request_id)


def completion_count(params: CompletionRequest) -> int:
    """Return the number of answers to compute; raise ApiError for fields that contradict each other."""
    if params.max_tokens != UNLIMITED and params.min_tokens > params.max_tokens:
        raise min_tokens_error(params.min_tokens, params.max_tokens)
    return len(params.prompt) * params.n


def min_tokens_error(min_tokens: int, max_tokens: int) -> ApiError:
    """Return the error for a `min_tokens` above `max_tokens`."""
    return ApiError(
        f"min_tokens is {str(min_tokens)[:40]} and max_tokens is {str(max_tokens)[:40]}, but min_tokens must be at most "
        "max_tokens. Lower min_tokens", param="min_tokens",
    )  # fmt: skip


def options_of(engine: LoadedEngine, params: Sampled, adapter: Loaded | None) -> dict[str, Any]:
    """Return the common fields of the dialect as options of `make_inference`.

    What the request does not name is as the model's authors recommend, where they do.
    """
    check_ids(engine, params.stop_token_ids, "stop_token_ids")
    biases = {int(token): bias for token, bias in params.logit_bias.items()}
    check_ids(engine, list(biases), "logit_bias")
    sampling = {
        name: engine.sampling[name] if name in engine.sampling and name not in params.model_fields_set else value
        for name, value in params
        if name in SAMPLING
    }
    return {
        **sampling,
        "top_k": max(int(sampling["top_k"]), 0),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": tuple(biases.items()),
        "stop_texts": params.stop,
        "stop_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "min_tokens": params.min_tokens,
        "keep_stop": params.include_stop_str_in_output,
        "hide_special": params.skip_special_tokens,
        "adapter": adapter,
        **params.scheduling_options(request.environ),
    }


def completion_request(engine: LoadedEngine, params: CompletionRequest, adapter: Loaded | None) -> GenerationRequest:
    """Return a completions request in common terms."""
    options = options_of(engine, params, adapter)
    if params.form is not None:
        options["grammar"] = constraint(engine, *params.form)
    if params.logprobs is not None:
        options["logprobs"] = params.logprobs
    scores = [params.prompt_logprobs, params.logprobs if params.echo else None]
    most = max((n for n in scores if n is not None), default=None)
    if most is not None or params.max_tokens == 0:
        options |= {"scores_prompt": True, "prompt_logprobs": most}
    return GenerationRequest(
        prompts_of(engine, params.prompt, params.truncate_prompt_tokens),
        None if params.max_tokens == UNLIMITED else params.max_tokens, "max_tokens", "prompt", options,
        n=params.n, seed=params.seed, timeout_s=params.timeout_s,
    )  # fmt: skip


def prompts_of(engine: LoadedEngine, sent: list[Any], keep: int | None, param: str = "prompt") -> list[Prompt]:
    """Return prompts that were sent as text or ids as both, truncated to their last `keep` tokens."""
    prompts = []
    for prompt in sent:
        if isinstance(prompt, str):
            ids = encode(engine, prompt, special=engine.special_end, keep=keep, param=param)
            text = prompt if keep is None else engine.tokenizer.decode(ids)
        else:
            check_ids(engine, prompt, param)
            ids = prompt if keep is None else prompt[-keep:]
            text = engine.tokenizer.decode(ids, begins=True)
        prompts.append(Prompt(text, ids))
    return prompts

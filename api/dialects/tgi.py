"""TGI's dialect: POST /generate and /generate_stream, POST / with inputs, GET /info."""

from __future__ import annotations

import time
from typing import Any

from flask import Response, jsonify, request

from api.admin import adapters
from api.dialects.tgi_writer import TgiWriter, samples
from api.generation import (
    GenerationRequest,
    adapter_of,
    constraint,
    ignored_hints,
    ready_engine,
    reply,
    start_generation,
)
from api.http.deferral import Deferred
from api.http.errors import ApiError
from api.http.openapi import EVENTS, JSON, Object, Routes, TypedDict
from api.prompts import Prompt, encode
from api.schemas import body
from api.schemas.fields import MOST_STOPS
from api.schemas.tgi import CompatRequest, GenerateParameters, GenerateRequest
from api.service import LoadedEngine, Service
from config import VERSION

EXAMPLE = '{"inputs": "ROMEO:", "parameters": {"max_new_tokens": 40}}'
SENT = {"inputs": "ROMEO:", "parameters": {"max_new_tokens": 8}}
GREETING = "effective-batching is running. Try POST /inference or GET /stats\n"
Generated = TypedDict("Generated", {"generated_text": str})


def routes_of(service: Service) -> Routes:
    """Return the routes of this dialect."""
    routes = Routes("tgi", "tgi")

    @routes.post(
        "/generate", "complete a prompt (TGI's API)", body=GenerateRequest, example=SENT, answer=Generated,
        generates=True,
    )  # fmt: skip
    def generate() -> Any:
        return _answer(service, body.take(request, EXAMPLE), GenerateRequest, False)

    @routes.post(
        "/generate_stream", "complete a prompt as a stream, with one event per token", body=GenerateRequest,
        example=SENT, answer={EVENTS: None}, generates=True,
    )  # fmt: skip
    def generate_stream() -> Any:
        return _answer(service, body.take(request, EXAMPLE), GenerateRequest, True)

    @routes.post(
        "/", "like /generate if the body has inputs (the answer is a list of one), otherwise a greeting",
        generates=True, answer={JSON: list[Generated], "text/plain": str, EVENTS: None},
    )  # fmt: skip
    def compatible() -> Any:
        try:
            fields = body.parse(body.read(request), EXAMPLE)
        except ApiError as error:
            if error.status != 400:
                raise
            fields = {}
        if "inputs" not in fields:
            return body.name_ignored(Response(GREETING, mimetype="text/plain"), fields)
        return _answer(service, fields, CompatRequest, None)

    @routes.get("/info", "the served model and the limits on requests", answer=Object, errors=(503,))
    def info() -> Response:
        return jsonify(information(service, ready_engine(service)))

    return routes


def _answer(
    service: Service, fields: dict[str, Any], schema: type[GenerateRequest], streams: bool | None
) -> Response | Deferred:
    """Answer a request; if `streams` is None, its body says whether to stream, and the answer is a list."""
    began = time.perf_counter()
    engine = ready_engine(service)
    params, ignored = body.validate(schema, fields)
    in_list = streams is None
    streams = params.stream if isinstance(params, CompatRequest) else bool(streams)
    if "stream" in ignored and fields["stream"] in (None, streams):  # it changes nothing
        ignored.remove("stream")
    parameters = params.parameters
    if parameters is not None:
        if streams and parameters.decoder_input_details:
            ignored.append("parameters.decoder_input_details")
        if parameters.top_n_tokens and not (streams or parameters.details or parameters.decoder_input_details):
            ignored.append("parameters.top_n_tokens")
        ignored += ignored_hints(engine, parameters, "parameters.")
    generation = start_generation(service, engine, generation_request(engine, params, streams), streams=streams)
    writer = TgiWriter(engine, generation, params, began)
    return reply(generation, ignored, lambda: writer.whole(in_list), writer.stream)


def generation_request(engine: LoadedEngine, params: GenerateRequest, streams: bool) -> GenerationRequest:
    """Return the request in common terms."""
    p = params.parameters or GenerateParameters()
    temperature = (1.0 if p.temperature is None else p.temperature) if samples(params.parameters) else 0.0
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": p.top_k or 0,
        "top_p": p.top_p or 1.0,
        "typical_p": p.typical_p or 1.0,
        "repetition_penalty": p.repetition_penalty or 1.0,
        "frequency_penalty": p.frequency_penalty or 0.0,
        "stop_texts": [*(p.stop or ()), *(p.stop_sequences or ())],
        "ignore_eos": False,
        "keep_stop": True,
        "hide_special": True,
        **p.scheduling_options(request.environ),
    }
    if streams or p.details or p.decoder_input_details:
        options["logprobs"] = p.top_n_tokens or 0
    if p.decoder_input_details and not streams:
        options |= {"scores_prompt": True, "prompt_logprobs": 0}
    if p.grammar is not None:
        options["grammar"] = constraint(engine, "grammar", p.grammar)
    options["adapter"] = None if p.adapter_id is None else adapter_of(engine, p.adapter_id, "adapter_id")
    ids = encode(engine, params.inputs, special=engine.special_end, keep=p.truncate, param="inputs")
    return GenerationRequest(
        [Prompt(params.inputs, ids)], p.max_new_tokens, "max_new_tokens", "inputs", options, seed=p.seed
    )


def information(service: Service, engine: LoadedEngine) -> dict[str, Any]:
    """Return the body of /info: TGI's fields, then ours."""
    manager, pages = engine.manager, engine.manager.pages
    return {
        "model_id": engine.served_name,
        "model_sha": engine.facts.get("revision"),
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": service.config.max_open_requests,
        "max_best_of": 1,
        "max_stop_sequences": MOST_STOPS,
        "max_input_tokens": engine.context - 1,
        "max_total_tokens": engine.context,
        "validation_workers": 1,
        "max_client_batch_size": 1,
        "router": "effective-batching",
        "version": VERSION,
        "sha": None,
        "docker_label": None,
        "policy": manager.policy_name,
        "policy_params": {"max_batch_size": manager.max_batch_size, **manager.policy_options},
        "max_batch_size": manager.max_batch_size,
        "sampling_defaults": dict(engine.sampling),
        "device": engine.device,
        "dtype": engine.dtype,
        "quantize": engine.quantize,
        "kv_dtype": engine.kv_dtype,
        "attention_backend": engine.facts.get("attention"),
        "linear_backend": engine.facts.get("linear"),
        "kernels": engine.facts.get("kernels", {}),
        "kernel_fallbacks": engine.facts.get("fallbacks", []),
        "speculate": 0 if manager.speculator is None else manager.speculator.most,
        "kv_pages": None if pages is None else pages.total,
        "page_size": engine.page_size,
        "adapters": adapters.listed(engine),
        "max_concurrent_sequences": {str(n): count for n, count in engine.sequences_that_fit.items()},
    }

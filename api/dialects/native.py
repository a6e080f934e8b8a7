"""The original's dialect: POST /inference, GET /stats, and the table of latencies by length."""

from __future__ import annotations

from typing import Any, ClassVar

from flask import Response, jsonify, request
from pydantic import Field

from api import streaming
from api.admin import policy
from api.generation import (
    Generation,
    GenerationRequest,
    adapter_of,
    ignored_hints,
    ready_engine,
    reply,
    start_generation,
    timings,
)
from api.http.openapi import Routes, TypedDict
from api.prompts import Prompt, encode
from api.schemas import body
from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.scheduling_hints import SchedulingHints
from api.service import LoadedEngine, Service
from observe.feed import data

EXAMPLE = '{"prompt": "ROMEO:", "num_tokens": 40}'


class InferenceRequest(SchedulingHints):
    """The original project's request with its two fields, and optional extensions."""

    unsupported: ClassVar = u.NATIVE

    prompt: f.Text = Field(description=f.PROMPT)
    num_tokens: f.Digits = Field(description="a whole number of tokens to generate, at least 1")
    temperature: f.Temperature = Field(1.0, description=f.TEMPERATURE)
    top_k: f.TopK = Field(0, description=f.TOP_K)
    top_p: f.TopP = Field(1.0, description=f.TOP_P)
    seed: f.Int64 | None = Field(None, description=f.SEED)
    stop: f.Stops = Field([], description=f.STOP)
    ignore_eos: f.Flag = Field(True, description=f.FLAG)
    stream: f.Flag = Field(False, description=f.FLAG)
    adapter: f.Adapter | None = Field(None, description=f.ADAPTER)
    timeout_s: f.Seconds | None = Field(None, description=f.SECONDS)


InferenceAnswer = TypedDict("InferenceAnswer", {
    "completion": str, "id": str, "num_tokens": int, "prompt_tokens": int, "cached_tokens": int, "finish_reason": str,
    "stop_reason": str | int | None, "timings": dict[str, float | None],
})  # fmt: skip
Statistics = TypedDict("Statistics", {
    "latency-per-token": float | None, "throughput": float | None, "total-tokens-handled": int,
    "total-elapsed-time": float,
})  # fmt: skip


def routes_of(service: Service) -> Routes:
    """Return the routes of this dialect."""
    routes = Routes("native", "original")

    @routes.post(
        "/inference", "complete a prompt (the original project's API)", body=InferenceRequest,
        example={"prompt": "ROMEO:", "num_tokens": 8}, answer=InferenceAnswer, generates=True, streams=True,
    )  # fmt: skip
    def inference() -> Any:
        engine = ready_engine(service)
        fields = body.take(request, EXAMPLE, any_type=True)
        params, ignored = body.validate(InferenceRequest, fields)
        generation = start_generation(service, engine, generation_request(engine, params), streams=params.stream)
        ignored += ignored_hints(engine, params)
        return reply(
            generation, ignored,
            lambda: jsonify({"completion": generation.inferences[0].completion} | ending(generation)),
            lambda: streaming.respond(
                generation, lambda new: data({"text": new.text} | (ending(generation) if new.ended else {}))
            ),
        )  # fmt: skip

    @routes.get("/stats", "server statistics: the original project's four figures, and more", answer=Statistics)
    def stats() -> Response:
        return jsonify(statistics(service))

    @routes.get(
        "/stats/token_data.csv", "mean latency in seconds by number of requested tokens", answer={"text/csv": str},
    )  # fmt: skip
    def token_data() -> Response:
        lines = [f"{n},{mean}\n" for n, mean in service.stats.token_breakdown().items()]
        return Response("".join(lines), mimetype="text/csv")

    return routes


def generation_request(engine: LoadedEngine, params: InferenceRequest) -> GenerationRequest:
    """Return the request in common terms. In the prompt, <|endoftext|> is plain text, as nothing is special here."""
    ids = encode(engine, params.prompt, special=False)
    options = {
        "temperature": params.temperature, "top_k": max(params.top_k, 0), "top_p": params.top_p,
        "stop_texts": params.stop, "ignore_eos": params.ignore_eos, **params.scheduling_options(request.environ),
        "adapter": None if params.adapter is None else adapter_of(engine, params.adapter, "adapter"),
    }  # fmt: skip
    return GenerationRequest(
        [Prompt(params.prompt, ids)], params.num_tokens, "num_tokens", "prompt", options,
        seed=params.seed, timeout_s=params.timeout_s,
    )  # fmt: skip


def ending(generation: Generation) -> dict[str, Any]:
    """Return the fields of an answer, or of the last event of a stream, beside its text."""
    inference = generation.inferences[0]
    return {
        "id": inference.sequence.id,
        "num_tokens": len(inference.output_ids),
        "prompt_tokens": len(inference.sequence.prompt_ids),
        "cached_tokens": inference.sequence.cached,
        "finish_reason": inference.finish_reason,
        "stop_reason": inference.stop_reason,
        "timings": timings(inference),
    }


def statistics(service: Service) -> dict[str, Any]:
    """Return the body of /stats, also before the first request and while the model loads."""
    engine = service.engine
    result = service.stats.snapshot() | {"http": service.meters.http_totals()}
    if engine is None:
        nothing = dict.fromkeys(("requests-running", "requests-waiting", "tokens-waiting", "prompt-tokens-waiting"), 0)
        return result | nothing | {"policy": service.config.policy, "engine": None}
    pages, recovery = engine.manager.pages, engine.manager.recovery
    kv = None
    if pages is not None:
        kv = {
            "pages_total": pages.total, "pages_used": pages.used, "pages_free": pages.free,
            "pages_cached": pages.cached, "page_size": pages.page_size,
            "query_tokens": pages.query_tokens, "hit_tokens": pages.hit_tokens,
            "sequences_that_fit": {str(n): count for n, count in engine.sequences_that_fit.items()},
        }  # fmt: skip
    if (dedup := engine.manager.dedup) is not None:
        result["deduplicated"] = {"requests": dedup.copies, "tokens": dedup.tokens}
    return result | {
        "requests-running": engine.manager.running,
        "requests-waiting": engine.manager.waiting,
        "tokens-waiting": engine.manager.inbox.queued_tokens,
        "prompt-tokens-waiting": engine.manager.inbox.prompt_tokens,
        "policy": engine.manager.policy_name,
        "engine": {"model": engine.model_name, "device": engine.device, "dtype": engine.dtype,
                   "quantize": engine.quantize, "kv_dtype": engine.kv_dtype,
                   "max_batch_size": engine.manager.max_batch_size, "slot_cap": engine.manager.slot_cap,
                   "max_tokens_per_step": engine.manager.max_tokens_per_step,
                   "policy_options": policy.state(engine)["options"],
                   "faults": {"steps_failed": recovery.steps_failed, "steps_retried": recovery.steps_retried,
                              "out_of_memory": recovery.out_of_memory, "deaths": service.deaths()},
                   **service.stats.engine(), "kv": kv,
                   "gpu": engine.facts.get("gauges", dict)()},
    }  # fmt: skip

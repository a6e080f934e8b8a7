"""The original's dialect: POST /inference, GET /stats, and the per-length table it used to write to disk."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify, request

from api import generation, policy, streaming
from api.generation import Generation, GenerationRequest, Prompt
from api.http import body
from api.http.deferral import Deferred
from api.http.openapi import Operation
from api.schemas import InferenceRequest
from api.service import Engine, Service
from api.streaming import Delta, StreamReader

EXAMPLE = '{"prompt": "ROMEO:", "num_tokens": 40}'
NUMBER = {"type": ["number", "null"]}
OPERATIONS = [
    Operation(
        "post", "/inference", "complete a prompt (the original project's API)", "original",
        body=InferenceRequest, example={"prompt": "ROMEO:", "num_tokens": 8}, generates=True, streams=True,
        answer={
            "type": "object",
            "required": ["completion", "id", "num_tokens", "finish_reason", "timings"],
            "properties": {
                "completion": {"type": "string"}, "id": {"type": "string"}, "num_tokens": {"type": "integer"},
                "prompt_tokens": {"type": "integer"}, "cached_tokens": {"type": "integer"},
                "finish_reason": {"type": "string"}, "stop_reason": {"type": ["string", "null"]},
                "timings": {"type": "object", "additionalProperties": NUMBER},
            },
        },
    ),
    Operation(
        "get", "/stats", "server statistics: the original project's four figures, and more", "original",
        answer={
            "type": "object",
            "required": ["latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time"],
            "properties": {"latency-per-token": NUMBER, "throughput": NUMBER},
        },
    ),
    Operation(
        "get", "/stats/token_data.csv", "mean latency in seconds by number of requested tokens", "original",
        media="text/csv", answer={"type": "string"},
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("native", __name__)

    @routes.post("/inference")
    def inference() -> Response | Deferred:
        engine = generation.ready_engine(service)
        fields = body.take(request, EXAMPLE, any_type=True)
        asked, ignored = body.validate(InferenceRequest, fields)
        job = generation.start(service, engine, ask_of(engine, asked), streams=asked.stream)
        ignored += generation.unheeded(engine, asked)
        if asked.stream:
            return body.name_ignored(stream(job), ignored)
        return Deferred(job, lambda: body.name_ignored(jsonify(answer(job)), ignored))

    @routes.get("/stats")
    def stats() -> Response:
        return jsonify(statistics(service))

    @routes.get("/stats/token_data.csv")
    def token_data() -> Response:
        lines = [f"{n},{mean}\n" for n, mean in service.stats.token_breakdown().items()]
        return Response("".join(lines), mimetype="text/csv")

    return routes


def ask_of(engine: Engine, asked: InferenceRequest) -> GenerationRequest:
    """Return what a request asks for; in a prompt end-of-text is plain text, as nothing is special here."""
    ids = generation.encode(engine, asked.prompt, special=False)
    options = {
        "temperature": asked.temperature, "top_k": max(asked.top_k, 0), "top_p": asked.top_p,
        "stops": asked.stop, "ignore_eos": asked.ignore_eos, **asked.scheduling_options(),
    }  # fmt: skip
    prompt = Prompt(asked.prompt, ids)
    return GenerationRequest(
        [prompt], asked.num_tokens, "num_tokens", options, seed=asked.seed, timeout_s=asked.timeout_s
    )


def answer(job: Generation) -> dict[str, Any]:
    """Wait for one completion; return the body of its answer."""
    job.wait()
    return {"completion": job.inferences[0].completion} | ending(job)


def ending(job: Generation) -> dict[str, Any]:
    """Return what is said of an answer beside its text."""
    inference = job.inferences[0]
    return {
        "id": inference.id,
        "num_tokens": len(inference.output_ids),
        "prompt_tokens": len(inference.sequence.prompt_ids),
        "cached_tokens": inference.sequence.cached,
        "finish_reason": inference.finish_reason,
        "stop_reason": inference.stop_reason,
        "timings": generation.timings(inference),
    }


def stream(job: Generation) -> Response:
    """Return the completion in pieces: events with `text`, the last with all else too; then [DONE]."""

    def chunk(growth: Delta) -> bytes:
        last = ending(job) if growth.ended else {}
        return streaming.event({"text": growth.text} | last)

    follower = StreamReader(0, job.inferences[0], scored=False, every_token=False)
    return streaming.respond(job, [follower], chunk, lambda: streaming.DONE)


def statistics(service: Service) -> dict[str, Any]:
    """Return the body of /stats, also before the first request and while the model loads."""
    engine = service.engine
    result = service.stats.snapshot() | {"http": service.meters.http_totals()}
    if engine is None:
        return result | {"requests-running": 0, "requests-waiting": 0, "policy": service.config.policy, "engine": None}
    pages, recovery = engine.manager.pages, engine.manager.recovery
    kv = None
    if pages is not None:
        kv = {
            "pages_total": pages.total, "pages_used": pages.used, "pages_free": pages.free,
            "pages_cached": pages.cached, "page_size": pages.page_size,
            "query_tokens": pages.query_tokens, "hit_tokens": pages.hit_tokens,
            "sequences_that_fit": {str(n): pages.total // pages.pages_for(n) for n in (128, 256, 512, 1024)},
        }  # fmt: skip
    if engine.shadow is not None:
        result["shadow"] = engine.shadow.report()
    return result | {
        "requests-running": engine.manager.running,
        "requests-waiting": engine.manager.waiting,
        "policy": engine.policy,
        "engine": {"model": engine.model_name, "device": engine.device, "dtype": engine.dtype,
                   "max_batch_size": engine.manager.max_batch_size, "slot_cap": engine.manager.slot_cap,
                   "max_tokens_per_step": engine.manager.max_tokens_per_step,
                   "policy_options": policy.state(engine)["options"],
                   "faults": {"steps_failed": recovery.steps_failed, "steps_retried": recovery.steps_retried,
                              "out_of_memory": recovery.out_of_memory, "deaths": service.deaths()},
                   **service.stats.engine(), "kv": kv},
    }  # fmt: skip

"""The original's dialect: POST /inference, GET /stats, and the per-length table it used to write to disk."""

from __future__ import annotations

import time
from typing import Any

from flask import Blueprint, Response, jsonify, request

from api import body, errors
from api.errors import ApiError
from api.openapi import Operation
from api.schemas import InferenceRequest
from api.service import Engine, Service
from batching import Inference, InferenceError

EXAMPLE = '{"prompt": "ROMEO:", "num_tokens": 40}'
NUMBER = {"type": ["number", "null"]}
OPERATIONS = [
    Operation(
        "post", "/inference", "complete a prompt, in the original's way", "original",
        body=InferenceRequest, example={"prompt": "ROMEO:", "num_tokens": 8}, generates=True, streams=True,
        answer={
            "type": "object",
            "required": ["completion", "id", "num_tokens", "finish_reason", "timings"],
            "properties": {
                "completion": {"type": "string"}, "id": {"type": "string"}, "num_tokens": {"type": "integer"},
                "finish_reason": {"type": "string"}, "timings": {"type": "object", "additionalProperties": NUMBER},
            },
        },
    ),
    Operation(
        "get", "/stats", "the original's four figures, and more beside them", "original",
        answer={
            "type": "object",
            "required": ["latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time"],
            "properties": {"latency-per-token": NUMBER, "throughput": NUMBER},
        },
    ),
    Operation(
        "get", "/stats/token_data.csv", "tokens asked for and mean latency in seconds", "original",
        media="text/csv", answer={"type": "string"},
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("native", __name__)

    @routes.post("/inference")
    def inference() -> Response:
        engine = ready_engine(service)
        asked, ignored = body.validate(InferenceRequest, body.parse(body.read(request), EXAMPLE))
        result = answer(service, engine, asked)
        reply = jsonify(result)
        if "priority" in asked.model_fields_set:
            ignored.append("priority")  # no policy here looks at it
        if ignored:
            reply.headers["X-Ignored-Params"] = _header_text(", ".join(ignored))
        return reply

    @routes.get("/stats")
    def stats() -> Response:
        return jsonify(statistics(service))

    @routes.get("/stats/token_data.csv")
    def token_data() -> Response:
        lines = [f"{n},{mean}\n" for n, mean in service.stats.token_breakdown().items()]
        return Response("".join(lines), mimetype="text/csv")

    @routes.post("/")
    def greeting() -> Response:
        return Response(
            "effective-batching is here: POST /inference, GET /stats\n", mimetype="text/plain"
        )

    return routes


def _header_text(text: str) -> str:
    """Return a client's own words in a form that a header can carry."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:1000])


def ready_engine(service: Service) -> Engine:
    """Return the engine, or raise 503 with the reason."""
    status, reason = service.status()
    if service.engine is None or status != "ok":
        raise ApiError(f"the server is {status}: {reason}. Try again", type="unavailable_error")
    return service.engine


def tokenize(engine: Engine, prompt: str, asked: int, name: str) -> list[int]:
    """Return the prompt's ids, refusing what cannot fit the context before it is tokenized."""
    most = engine.context * engine.tokenizer.longest_token
    size = len(prompt.encode("utf-8", "replace"))
    if size > most:
        raise ApiError(
            f"prompt has {size:,} bytes, a context of {engine.context:,} tokens holds {most:,} at most. "
            "Shorten the prompt", param="prompt", code="context_length_exceeded",
        )  # fmt: skip
    try:
        prompt.encode("utf-8")
        ids = engine.tokenizer.encode(prompt)
    except ValueError as error:
        raise ApiError(f"prompt cannot be tokenized: {str(error)[:200]}", param="prompt") from None
    room = engine.context - len(ids)
    if asked > room:
        remedy = (
            f"Shorten the prompt or ask for at most {room:,} tokens" if room > 0 else
            f"Shorten the prompt to at most {engine.context - 1:,} tokens"
        )  # fmt: skip
        number = f"{asked:,}" if asked < 10**18 else errors.shown(asked)
        raise ApiError(
            f"prompt has {len(ids):,} tokens and {name} is {number}; together they may be "
            f"{engine.context:,} at most. {remedy}",
            param=name if room > 0 else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    return ids


def answer(service: Service, engine: Engine, asked: InferenceRequest) -> dict[str, Any]:
    """Generate one completion; return the body of its answer."""
    ids = tokenize(engine, asked.prompt, asked.num_tokens, "num_tokens")
    inference = engine.make_inference(
        asked.prompt, asked.num_tokens, ids,
        temperature=asked.temperature, top_k=max(asked.top_k, 0), top_p=asked.top_p, seed=asked.seed,
        stops=asked.stop, ignore_eos=asked.ignore_eos, client=asked.user,
    )  # fmt: skip
    try:
        engine.manager.enqueue(inference)
        part = partial(inference, asked.timeout_s, service.config.request_timeout)
        if part is not None:
            return part
        completion = inference.wait_for_completion(service.config.request_timeout)
    except InferenceError as error:
        raise errors.from_inference(error) from None
    seq = inference.sequence
    return {
        "completion": completion,
        "id": inference.id,
        "num_tokens": len(seq.output_ids),
        "finish_reason": seq.finish_reason,
        "timings": timings(inference),
    }


def partial(inference: Inference, own: float | None, limit: float) -> dict[str, Any] | None:
    """Wait the request's `own` seconds, then end it with what it has; None if it ended by itself.

    A request can only lower the server's `limit`, which ends it with 504.
    """
    if own is None or own >= limit or inference.event_obj.wait(own):
        return None
    over = InferenceError("timeout_error", f"timeout_s of {own:g} s is over")
    inference.cancel(over)
    if inference.error is not over:
        return None  # it ended in the very moment
    ids = list(inference.sequence.output_ids)
    return {
        "completion": inference.prompt + (inference.text.text(ids) if inference.text else ""),
        "id": inference.id,
        "num_tokens": len(ids),
        "finish_reason": "length",
        "timings": timings(inference),
    }


def timings(inference: Inference) -> dict[str, float | int | None]:
    """Return where a finished request's time went, in seconds, and in what company it ran."""
    seq = inference.sequence
    scheduled = seq.scheduled_at if seq.scheduled_at is not None else time.perf_counter()
    first = seq.first_token_at if seq.first_token_at is not None else scheduled
    last = seq.finished_at if seq.finished_at is not None else max(first, time.perf_counter())
    return {
        "queue_s": scheduled - seq.arrived_at,
        "prefill_s": first - scheduled,
        "decode_s": last - first,
        "ttft_s": first - seq.arrived_at,
        "total_s": last - seq.arrived_at,
        "iterations": seq.iterations,
        "batch_mean": seq.batch_sum / seq.iterations if seq.iterations else 0,
        "batch_max": seq.batch_max,
    }


def statistics(service: Service) -> dict[str, Any]:
    """Return the body of /stats, also before the first request and while the model loads."""
    engine = service.engine
    result = service.stats.snapshot()
    if engine is None:
        return result | {"requests-running": 0, "requests-waiting": 0, "policy": service.config.policy,
                         "engine": None}  # fmt: skip
    pages = engine.manager.pages
    kv = None
    if pages is not None:
        kv = {
            "pages_total": pages.total, "pages_used": pages.used, "pages_free": pages.free,
            "pages_cached": pages.cached, "page_size": pages.page_size,
            "query_tokens": pages.query_tokens, "hit_tokens": pages.hit_tokens,
            "sequences_that_fit": {str(n): pages.total // pages.pages_for(n) for n in (128, 256, 512, 1024)},
        }  # fmt: skip
    return result | {
        "requests-running": engine.manager.running,
        "requests-waiting": engine.manager.waiting,
        "policy": engine.policy,
        "engine": {"model": engine.model_name, "device": engine.device, "dtype": engine.dtype,
                   "max_batch_size": engine.manager.max_batch_size,
                   **service.stats.engine(), "kv": kv},
    }  # fmt: skip

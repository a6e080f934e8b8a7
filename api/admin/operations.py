"""Health checks, metrics, slots, and the state of single requests.

No answer here waits for the engine. A request is described by lengths and times, never by its text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flask import Blueprint, Response, jsonify, request

from api.admin.metrics import Exposition
from api.http.errors import ApiError, shown
from api.http.openapi import Operation
from api.pages import dashboard
from api.service import Service

HEALTH = ("/health", "/healthz", "/ping")
READY = ("/ready", "/health/ready")
NUMBER = {"type": ["number", "null"]}
STATE = {
    "type": "object",
    "required": ["status", "last_iteration_age_s"],
    "properties": {"status": {"type": "string"}, "reason": {"type": "string"}, "last_iteration_age_s": NUMBER},
}
TIMELINE = {
    "type": "object",
    "required": ["id", "state", "finish_reason"],
    "properties": {
        "id": {"type": "string"},
        "state": {"enum": ["waiting", "running", "held", "finished"]},
        "finish_reason": {"type": ["string", "null"]},
        "prompt_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"},
        "cached_tokens": {"type": "integer"}, "computed_as": {"type": ["string", "null"]}, "program": {"type": ["object", "null"]},
        "arrived_at": NUMBER, "scheduled_at": NUMBER,
        "first_token_at": NUMBER, "finished_at": NUMBER, "iterations": {"type": ["array", "null"]},
        "batch": {"type": "object"}, "waited": {"type": "array"}, "blame": {"type": ["string", "null"]}, "choices": {"type": "array"},
    },
}  # fmt: skip
SLOT = {
    "type": "object",
    "required": ["id", "id_task", "n_ctx", "is_processing", "state", "prompt_tokens", "params", "next_token"],
}
CANCELLED = {
    "type": "object",
    "required": ["id", "state"],
    "properties": {"id": {"type": "string"}, "state": {"type": "string"}},
}
TAG = "operations"
OPERATIONS = [
    *(Operation("get", path, "whether the batching loop is alive", TAG, answer=STATE, answers={503: STATE}) for path in ("/", *HEALTH)),
    *(Operation("get", path, "whether the server accepts new requests", TAG, answer=STATE, answers={503: STATE}) for path in READY),
    Operation("get", "/health/live", "whether the process responds", TAG, answer={"type": "object"}),
    Operation("get", "/metrics", "metrics for Prometheus", TAG, media="text/plain", answer={"type": "string"}),
    Operation(
        "get", "/slots", "the state of each slot of the batch", TAG, errors=(400, 503),
        answer={"type": "array", "items": SLOT}, query={"fail_on_no_slot": {"type": "string", "enum": ["0", "1"]}},
    ),
    Operation("get", "/requests/{id}", "the state or outcome of a request", TAG, answer=TIMELINE, errors=(404,)),
    Operation("delete", "/requests/{id}", "cancel a request", TAG, answer=CANCELLED, errors=(404,)),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("operations", __name__)
    exposition = Exposition(service)

    def health() -> Response:
        return _state(service, *service.health())

    def ready() -> Response:
        return _state(service, *service.readiness())

    def home() -> Response:
        return dashboard.page() if dashboard.wants_page() else health()

    for paths, view in ((HEALTH, health), (READY, ready), (("/",), home)):
        for path in paths:
            name = path.strip("/").replace("/", "_") or "home"
            routes.add_url_rule(path, endpoint=name, view_func=view)

    @routes.get("/health/live")
    def live() -> Response:
        return jsonify(status="ok")

    @routes.get("/metrics")
    def metrics() -> Response:
        text, content_type = exposition.render(request.headers.get("Accept", ""))
        return Response(text, content_type=content_type)

    @routes.get("/slots")
    def slots() -> Response:
        return jsonify(_slots(service, request.args.get("fail_on_no_slot", "0")))

    @routes.get("/requests/<id>")
    def timeline(id: str) -> Response:
        record = service.registry.find(id)
        if record is None:
            raise _unknown(id)
        return jsonify(record)

    @routes.delete("/requests/<id>")
    def cancel(id: str) -> Response:
        state = service.registry.cancel(id)
        if state is None:
            raise _unknown(id)
        return jsonify(id=id, state=state)

    return routes


def _state(service: Service, status: str, reason: str | None) -> Response:
    engine = service.engine
    policy = service.config.policy if engine is None else engine.manager.policy_name
    body: dict[str, object] = {"status": status, "policy": policy}
    if reason:
        body["reason"] = reason
    if engine is not None:
        body["model"] = engine.model_name
        if engine.manager.slot_cap < engine.manager.max_batch_size:
            body["slot_cap"] = engine.manager.slot_cap
        if "slot_cap" in body and engine.manager.recovery.out_of_memory:
            body["advice"] = (
                f"memory ran out with more than {engine.manager.slot_cap} requests in a batch; "
                f"start with --max-batch-size {engine.manager.slot_cap}"
            )
    age = service.heartbeat_age()
    body["last_iteration_age_s"] = None if age is None else round(age, 3)
    result = jsonify(body)
    if status != "ok":
        result.status_code = 503
        result.headers["Retry-After"] = "1"
    return result


def _unknown(id: str) -> ApiError:
    return ApiError(
        f"request {shown(id)} is unknown. Use the X-Request-Id of a response; the last 1,000 finished "
        "requests are kept",
        type="not_found_error",
    )


def _slots(service: Service, fail: str) -> list[dict[str, Any]]:
    """Return the slots in order; with `fail`, raise ApiError if none is idle."""
    if fail not in ("0", "1"):
        raise ApiError(f"fail_on_no_slot is {shown(fail)}, but must be 0 or 1. Send 0 or 1", param="fail_on_no_slot")
    engine = service.engine
    scheduler = None if engine is None else engine.manager.scheduler
    by_slot = {} if scheduler is None else {seq.slot: seq for seq in scheduler.sharing.running}
    total = engine.manager.max_batch_size if engine is not None else 0
    if fail == "1" and len(by_slot) >= total:
        raise ApiError(
            f"all {total} slots are in use. Try again later, or raise --max-batch-size",
            type="unavailable_error",
            retry_after=1 if engine is None else engine.manager.inbox.retry_after(),
        )
    context = engine.context if engine is not None else 0
    return [_slot(number, by_slot.get(number), context) for number in range(total)]


def _slot(number: int, seq: Any, context: int) -> dict[str, Any]:
    if seq is None:
        content: dict[str, Any] = {"id_task": None, "state": "idle", "prompt_tokens": 0, "params": {}}
        decoded = remain = 0
    else:
        phase = "prefill" if seq.is_prefilling else "decode"
        state = "held" if seq.is_finished else phase
        content = {"id_task": seq.id, "state": state, "prompt_tokens": len(seq.prompt_ids),
                "params": {"max_tokens": seq.max_tokens, **_plain(seq.sampling)}}  # fmt: skip
        decoded = len(seq.output_ids)
        remain = 0 if seq.is_finished else seq.max_tokens - decoded
    return {
        "id": number,
        "n_ctx": context,
        "is_processing": seq is not None,
        **content,
        "next_token": {"n_decoded": decoded, "n_remain": remain},
    }


def _plain(sampling: Any) -> dict[str, Any]:
    """Return the numbers among a request's sampling parameters."""
    fields = dataclasses.fields(sampling) if dataclasses.is_dataclass(sampling) else ()
    values = {field.name: getattr(sampling, field.name) for field in fields}
    return {k: v for k, v in values.items() if isinstance(v, int | float | bool)}

"""Health checks, metrics, slots, and the state of single requests.

No answer here waits for the engine. A request is described by lengths and times, never by its text.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from flask import Response, jsonify
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from api.admin.metrics import Exposition
from api.http.errors import ApiError, shown
from api.http.openapi import NotRequired, Object, Required, Routes, TypedDict
from api.pages import dashboard
from api.service import LoadedEngine, Service

HEALTH = ("/health", "/healthz", "/ping")
READY = ("/ready", "/health/ready")
Health = TypedDict("Health", {"status": str, "reason": NotRequired[str], "last_iteration_age_s": float | None})
Timeline = TypedDict("Timeline", {
    "id": Required[str], "state": Required[Literal["waiting", "running", "held", "finished"]],
    "finish_reason": Required[str | None], "prompt_tokens": int, "output_tokens": int, "cached_tokens": int,
    "computed_as": str | None, "program": Object | None, "arrived_at": float | None, "scheduled_at": float | None,
    "first_token_at": float | None, "finished_at": float | None, "iterations": list[int] | None, "batch": Object,
    "waited": list[Object], "blame": str | None, "choices": list[Object],
}, total=False)  # fmt: skip
Cancelled = TypedDict("Cancelled", {"id": str, "state": str})
ALIVE, ACCEPTS = "whether the batching loop is alive", "whether the server accepts new requests"
STATES: dict[str, Any] = {"answer": Health, "answers": {503: Health}}


def routes_of(service: Service) -> Routes:
    """Return the routes."""
    routes = Routes("operations", "operations")
    exposition = Exposition(service)

    def health() -> Response:
        return _state(service, *service.health())

    def ready() -> Response:
        return _state(service, *service.readiness())

    def home() -> Response:
        return dashboard.page() if dashboard.wants_page() else health()

    for paths, view, whether in ((("/",), home, ALIVE), (HEALTH, health, ALIVE), (READY, ready, ACCEPTS)):
        for path in paths:
            routes.get(path, whether, **STATES)(view)

    @routes.get("/health/live", "whether the process responds", answer=dict[str, str])
    def live() -> Response:
        return jsonify(status="ok")

    @routes.get("/metrics", "metrics for Prometheus", answer={"text/plain": str})
    def metrics() -> Response:
        return Response(generate_latest(exposition.registry), content_type=CONTENT_TYPE_PLAIN_0_0_4)

    @routes.get("/slots", "the state of each slot of the batch", answer=list[Object])
    def slots() -> Response:
        return jsonify(_slots(service.engine))

    @routes.get("/requests/<id>", "the state or outcome of a request", answer=Timeline, errors=(404,))
    def timeline(id: str) -> Response:
        return jsonify(_known(service.registry.find(id), id))

    @routes.delete("/requests/<id>", "cancel a request", answer=Cancelled, errors=(404,))
    def cancel(id: str) -> Response:
        return jsonify(id=id, state=_known(service.registry.cancel(id), id))

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


def _known(found: Any, id: str) -> Any:
    """Return what was found of a request; raise 404 if that is nothing."""
    if found is None:
        raise ApiError(
            f"request {shown(id)} is unknown. Use the X-Request-Id of a response; the last 1,000 finished "
            "requests are kept",
            type="not_found_error",
        )
    return found


def _slots(engine: LoadedEngine | None) -> list[dict[str, Any]]:
    """Return the slots in order."""
    if engine is None:
        return []
    scheduler = engine.manager.scheduler
    by_slot = {} if scheduler is None else {seq.slot: seq for seq in scheduler.sharing.running}
    return [_slot(number, by_slot.get(number), engine.context) for number in range(engine.manager.max_batch_size)]


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

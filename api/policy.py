"""GET and PUT /policy: the active policy, and a switch to another one while requests run.

The loop switches between two iterations, so no request is lost, and the answer follows the switch. Only the policies of
this project can be named: no name from the network is looked up in the file system or imported.
"""

from __future__ import annotations

import math
from typing import Any

from flask import Blueprint, Response, jsonify, request

from api import generation
from api.http import body, errors
from api.http.errors import ApiError
from api.http.openapi import Operation
from api.schemas.policy import PolicyRequest
from api.service import Engine, Policies, Service
from batching import InferenceError

EXAMPLE = '{"policy": "dynamic+sjf", "options": {"predictor": "noisy"}}'
ANSWER = {
    "type": "object",
    "required": ["policy", "options", "max_batch_size"],
    "properties": {
        "policy": {"type": "string"}, "options": {"type": "object"},
        "max_batch_size": {"type": "integer", "minimum": 1},
    },
}  # fmt: skip
KNOWN = {
    "type": "object",
    "required": [*ANSWER["required"], "policies", "orders", "options_of", "closed"],
    "properties": {
        **ANSWER["properties"], "policies": {"type": "object"}, "orders": {"type": "object"},  # type: ignore[dict-item]
        "options_of": {"type": "object"}, "closed": {"type": "array", "items": {"type": "string"}},
    },
}  # fmt: skip
OPERATIONS = [
    Operation(
        "get", "/policy", "the active policy and the available ones", "policy", answer=KNOWN, errors=(503,),
        unlisted="PUT changes the policy",
    ),
    Operation(
        "put", "/policy", "switch to another policy at the next iteration", "policy", body=PolicyRequest,
        example={"policy": "dynamic+sjf", "options": {"predictor": "noisy"}}, answer=ANSWER,
        errors=(400, 413, 415, 503, 504), unlisted="it changes the policy",
    ),
]  # fmt: skip


def blueprint(service: Service) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("policy", __name__)

    @routes.get("/policy")
    def policy() -> Response:
        engine, known = generation.ready_engine(service), _known(service)
        loops, orders = known.names(), known.order_names()
        return jsonify(
            **state(engine),
            policies={name: known.summary(name) for name in loops},
            orders={name: known.order_summary(name) for name in orders},
            options_of={
                "policies": {name: known.form_of(name) for name in loops},
                "orders": {name: known.form_of(name, is_order=True) for name in orders},
            },
            closed=[name for name in loops if known.is_closed(name)],
        )

    @routes.put("/policy")
    def switch() -> Response:
        engine, known = generation.ready_engine(service), _known(service)
        params, ignored = body.validate(PolicyRequest, body.take(request, EXAMPLE))
        try:
            policy = known.get_policy(params.policy, service.config.max_batch_size, params.options, own=False)
        except ValueError as error:
            raise ApiError(str(error)[:2000], param="policy") from None
        try:
            engine.manager.switch(policy, timeout=service.stall_seconds)
        except InferenceError as error:
            raise errors.from_inference(error) from None
        now = state(engine)
        service.feed.announce("policy", {**now, "max_queue": engine.manager.max_queue})
        return body.name_ignored(jsonify(now), ignored)

    return routes


def state(engine: Engine) -> dict[str, Any]:
    """Return the active policy, its options and the number of slots."""
    manager = engine.manager
    options = {name: _plain(value) for name, value in manager.policy_options.items()}
    return {"policy": engine.policy, "options": options, "max_batch_size": manager.max_batch_size}


def _plain(value: Any) -> Any:
    """Return a JSON value for an option: infinite numbers become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _known(service: Service) -> Policies:
    if service.policies is None:
        raise ApiError(
            "this server was created without a choice of policies. Start it with ./server.sh", type="unavailable_error"
        )
    return service.policies

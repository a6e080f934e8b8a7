"""GET and PUT /policy: the active policy, and a switch to another one while requests run, for good or for a lease's time.

The loop switches between two iterations, so no request is lost, and the answer follows the switch. Only the policies of
this project can be named: no name from the network is looked up in the file system or imported. GET /served tells which
policy served what.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from typing import Annotated, Any

from flask import Response, jsonify, request
from pydantic import BaseModel, Field, StrictBool, StrictStr, WrapValidator

from api import generation
from api.http.errors import ApiError, shown
from api.http.openapi import Object, Routes
from api.schemas import body
from api.schemas import fields as f
from api.schemas.openai import one_of_these
from api.service import LoadedEngine, Service
from serving.fallback import Lease

RECEIPT = {"lease": "LEASE", "lines": [["what", "A", "B"], ["E2E mean", "0.9", "0.6"], ["take B"]]}
EXAMPLE = '{"policy": "dynamic+sjf", "options": {"predictor": "noisy"}}'
MOST_OPTIONS = 32
LONGEST_VALUE = 256
LONGEST_LEASE = 600.0  # seconds
OPTIONS = (
    f'an object such as {{"aging": 30}}, with numbers, true, false, or strings of at most {LONGEST_VALUE} characters'
)


Option = Annotated[
    StrictBool
    | Annotated[int, Field(strict=True, ge=-f.INT64, lt=f.INT64)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-f.INT64, lt=f.INT64)]
    | Annotated[StrictStr, Field(max_length=LONGEST_VALUE)],
    WrapValidator(one_of_these),
]
Text = Annotated[StrictStr, Field(max_length=1000)]
Options = Annotated[dict[Annotated[str, Field(max_length=LONGEST_VALUE)], Option], f.at_most(MOST_OPTIONS)]


class PolicyRequest(BaseModel):
    """PUT /policy: the policy to switch to."""

    policy: Annotated[StrictStr, Field(min_length=1, max_length=100)] = Field(
        description="the name of a policy, or loop+order as in dynamic+sjf"
    )
    options: Options = Field({}, description=OPTIONS)
    for_s: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=LONGEST_LEASE), f.NUMBER] | None = Field(
        None,
        description=f"seconds, at most {LONGEST_LEASE:g}, after which the policy before comes back, unless `lease` renews it",
    )
    lease: Annotated[StrictStr, Field(max_length=64)] = Field(
        "", description="the lease to renew, from the answer that began it. Until it ends, no other client may switch"
    )


class ReceiptRequest(BaseModel):
    """POST /policy/receipt: what an experiment with policies found, to be shown by the live page."""

    lease: Annotated[StrictStr, Field(min_length=1, max_length=64)] = Field(description="the lease of the experiment")
    lines: Annotated[list[Annotated[list[Text], Field(max_length=8)]], Field(max_length=32)] = Field(
        description="tables and texts"
    )


def routes_of(service: Service) -> Routes:
    """Return the routes."""
    routes = Routes("policy", "policy")

    @routes.get("/policy", "the active policy and the available ones", answer=Object, errors=(503,))
    def policy() -> Response:
        engine, known = generation.ready_engine(service), service.policies
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
            last_failure=last_failure(engine),
        )

    @routes.put(
        "/policy", "switch to another policy at the next iteration", body=PolicyRequest,
        example={"policy": "dynamic+sjf", "options": {"predictor": "noisy"}}, answer=Object, errors=(409, 503, 504),
    )  # fmt: skip
    def switch() -> Response:
        engine, known = generation.ready_engine(service), service.policies
        params, ignored = body.validate(PolicyRequest, body.take(request, EXAMPLE))
        is_kept = params.for_s is not None and not params.options
        policy = engine.manager.fallback.like(params.policy, engine.manager.policy) if is_kept else None
        policy = policy or create(known, params.policy, service.config.max_batch_size, params.options)
        if params.for_s is not None and not getattr(known, "leases", True):
            raise ApiError("replicas of a fleet lease no policy. Leave out for_s", param="for_s")
        if params.lease and params.for_s is None:
            raise ApiError("a lease is renewed for a time. Send for_s, too", param="for_s")
        lease = None
        if params.for_s is not None:
            lease = Lease(params.lease or secrets.token_hex(16), params.for_s, renews=bool(params.lease))
        engine.manager.inbox.switch(policy, service.stall_seconds, lease)
        now = {} if lease is None else {"lease": lease.holder, "now": time.perf_counter()}
        return body.name_ignored(jsonify(state(engine) | now), ignored)

    @routes.delete(
        "/policy/lease", "end a lease at once, with `?lease=LEASE` only that one: the policy before comes back",
        answer=Object, errors=(503, 504),
    )  # fmt: skip
    def end() -> Response:
        engine = generation.ready_engine(service)
        holder = request.args.get("lease")
        engine.manager.inbox.switch(None, service.stall_seconds, None if holder is None else Lease(holder, 0.0))
        return jsonify(state(engine))

    @routes.post(
        "/policy/receipt", "show on the live page what an experiment found, while its lease lasts", body=ReceiptRequest,
        example=RECEIPT, answer=Object, errors=(409, 503),
    )  # fmt: skip
    def receipt() -> Response:
        engine = generation.ready_engine(service)
        params, ignored = body.validate(ReceiptRequest, body.take(request, json.dumps(RECEIPT)))
        if params.lease != engine.manager.fallback.holder:
            raise ApiError("this lease has ended", type="conflict_error")
        service.feed.announce("receipt", params.model_dump(exclude={"lease"}))
        return body.name_ignored(jsonify(state(engine)), ignored)

    @routes.get(
        "/served", "the requests that ended since the first `?since=N`, and the open ones: times, tokens and policy",
        answer=Object, errors=(400, 503),
    )  # fmt: skip
    def served() -> Response:
        engine = generation.ready_engine(service)
        since = request.args.get("since", "0")
        if service.served is None or not since.isdecimal():
            raise ApiError("since must be 0 or `next` of the last answer", param="since")
        now = {"last_failure": last_failure(engine), "leased": bool(engine.manager.fallback.holder)}
        return jsonify(**service.served.since(int(since)), **state(engine), **now)

    return routes


def create(known: Any, name: str, slots: int, options: dict[str, Any]) -> Any:
    """Return a policy of this project; ApiError for a wrong name or wrong options."""
    try:
        known.check_name(name, own=False)
    except ValueError as error:
        text = str(error)[:2000]
        if any(part.endswith(".py") or "." in part for part in name.split("+")):
            text = (
                f"unknown policy {shown(name)}: a file or module is loaded at the start only. "
                f"Restart with it, as in {getattr(known, 'start', './server.sh')} {name}, or use one of: {', '.join(known.names())}"
            )
        raise ApiError(text, param="policy") from None
    try:
        return known.get_policy(name, slots, options, own=False)
    except ValueError as error:
        raise ApiError(str(error)[:2000], param="options") from None
    except Exception as error:  # the arithmetic of a policy may not be up to all values within its bounds
        text = f"policy {name} cannot be created with these options ({type(error).__name__}: {error}). Correct them"
        raise ApiError(text[:2000], param="options") from None


def announce(service: Service, engine: LoadedEngine) -> None:
    """Tell the live page which policy serves, and which one failed last."""
    now = {**state(engine), "max_queue": engine.manager.max_queue, "last_failure": last_failure(engine)}
    service.feed.announce("policy", now | {"leased": bool(engine.manager.fallback.holder), "now": time.perf_counter()})


def last_failure(engine: LoadedEngine) -> dict[str, Any] | None:
    """Return the last failure of a policy after which the server went back to another, None if there was none."""
    last = engine.manager.fallback.last
    return None if last is None else last.to_dict()


def state(engine: LoadedEngine) -> dict[str, Any]:
    """Return the active policy, its options and the number of slots."""
    manager = engine.manager
    options = {name: _plain(value) for name, value in manager.policy_options.items()}
    return {"policy": manager.policy_name, "options": options, "max_batch_size": manager.max_batch_size}


def _plain(value: Any) -> Any:
    """Return a JSON value for an option: infinite numbers become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""POST /what-if simulates other policies on the requests that this server has just served, and
GET /requests/{id}/blame tells which of them made another one wait.

An answer is made by another process and goes to the client as it comes. This module must not know how it is made.
"""

from __future__ import annotations

from typing import Annotated, Literal

from flask import Response, request
from pydantic import BaseModel, Field, StrictStr

from api import generation
from api.admin.policy import Options, create
from api.http.errors import ApiError
from api.http.openapi import Object, Routes
from api.schemas import body
from api.schemas import fields as f
from api.service import Service
from observe.replay.what_if import WhatIf, Workload

EXAMPLE = '{"policies": ["nobatch", "static"]}'
MOST_REQUESTS = 400
MOST_POLICIES = 6
Name = Annotated[StrictStr, Field(min_length=1, max_length=100)]
Count = Annotated[int, Field(strict=True, ge=1, le=MOST_REQUESTS), f.INTEGER]
Rate = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1000), f.NUMBER]


class WhatIfRequest(BaseModel):
    """POST /what-if: the policies to simulate, and the requests to simulate them on."""

    policies: Annotated[list[Name], Field(max_length=MOST_POLICIES)] = Field(
        ["nobatch", "static", "dynamic"],
        description=f"a list of at most {MOST_POLICIES} names of policies, each also as loop+order as in dynamic+sjf",
    )
    options: dict[Name, Options] = Field(
        {}, description='an object with options of some of them, as {"dynamic+boost": {"gamma": 0.1}}'
    )
    requests: Literal["latest", "load"] = Field(
        "latest",
        description="'latest' (the requests after the last pause) or 'load' (those that arrived during the last POST /load)",
    )
    count: Count = Field(200, description=f"a whole number of requests at most, 1 to {MOST_REQUESTS}")
    workload: Annotated[StrictStr, Field(max_length=40, pattern=r"^([a-z][a-z0-9-]*)?$")] = Field(
        "",
        description="the name of one of the client's workloads, as clipped-normal, to simulate instead of served requests",
    )
    rate: Rate = Field(4.0, description="a number of the workload's requests per second, above 0 and at most 1000")
    seed: Annotated[int, Field(strict=True, ge=0, le=(1 << 32) - 1), f.INTEGER] = Field(
        0, description="a whole number for the workload's random generator, 0 to 2^32 - 1"
    )


def install(routes: Routes, service: Service) -> None:
    """Add the routes."""

    @routes.post(
        "/what-if", "simulate other policies on the requests that were just served", body=WhatIfRequest,
        example={"policies": ["nobatch", "static"]}, answer=Object, errors=(404, 429, 500, 503, 504),
    )  # fmt: skip
    def what_if() -> Response:
        params, ignored = body.validate(WhatIfRequest, body.take(request, EXAMPLE))
        simulator = _simulator(service)
        for name in params.policies:
            try:
                service.policies.check_name(name, own=False)
            except ValueError as error:
                raise ApiError(str(error)[:2000], type="not_found_error", param="policies") from None
            create(service.policies, name, service.config.max_batch_size, params.options.get(name, {}))
        span = service.load.span() if params.requests == "load" else None
        if params.requests == "load" and span is None:
            raise ApiError("no load was sent to this server. Send POST /load first", type="not_found_error")
        workload = Workload(params.workload, params.rate, params.seed) if params.workload else None
        asked = params.policies, params.count
        answer = simulator.answer(*asked, options=params.options, span=span, workload=workload)
        return body.name_ignored(Response(answer, mimetype="application/json"), ignored)

    @routes.get(
        "/requests/<path:id>/blame", "which other requests made a request wait or slowed its tokens", answer=Object,
        errors=(404, 429, 500, 503, 504),
    )  # fmt: skip
    def blame(id: str) -> Response:
        known = service.registry.find(id)  # by an id as OpenAI's answers have it, too
        return Response(_simulator(service).blame(known["id"] if known else id), mimetype="application/json")


def _simulator(service: Service) -> WhatIf:
    engine = generation.ready_engine(service)
    if engine.what_if is None:
        raise ApiError("this server was created without a simulator. Start it with ./server.sh", type="not_found_error")
    return engine.what_if

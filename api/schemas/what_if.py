"""The schema of requests to /what-if."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictStr

from api.schemas import fields as f

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

"""The schema of requests to /load, which the button of the live page sends."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.schemas import fields as f

MOST = 400  # requests of one load
Count = Annotated[int, Field(strict=True, ge=1, le=MOST), f.INTEGER]
Tokens = Annotated[int, Field(strict=True, ge=1, le=512), f.INTEGER]
Rate = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1000), f.NUMBER]


class LoadRequest(BaseModel):
    """A bounded load: a Poisson process with the given rate, or all requests at once."""

    model_config = ConfigDict(extra="ignore")

    count: Count = Field(40, description=f"a whole number of requests, 1 to {MOST}")
    rate: Rate = Field(0.0, description="a number of requests per second up to 1000, or 0 to send all at once")
    min_tokens: Tokens = Field(8, description="a whole number of tokens, 1 to 512")
    max_tokens: Tokens = Field(64, description="a whole number of tokens, 1 to 512")
    seed: f.Int64 = Field(0, description=f.SEED)

"""The schema of requests to /load, which the buttons and the tour of the live page send."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from api.schemas import fields as f

MOST = 400  # requests of one load
Count = Annotated[int, Field(strict=True, ge=1, le=MOST), f.INTEGER]
Tokens = Annotated[int, Field(strict=True, ge=1, le=512), f.INTEGER]
Rate = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1000), f.NUMBER]
Users = Annotated[int, Field(strict=True, ge=0, le=256), f.INTEGER]
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=60), f.NUMBER]


class LoadRequest(BaseModel):
    """A bounded load, which is a Poisson process or all requests at once, or an endless one of users who wait."""

    count: Count = Field(40, description=f"a whole number of requests, 1 to {MOST}")
    rate: Rate = Field(0.0, description="a number of requests per second up to 1000, or 0 to send all at once")
    min_tokens: Tokens = Field(8, description="a whole number of tokens, 1 to 512")
    max_tokens: Tokens = Field(64, description="a whole number of tokens, 1 to 512")
    seed: f.Int64 = Field(0, description=f.SEED)
    users: Users = Field(
        0, description="a whole number of users, 0 to 256: each sends its next request after the answer to the last, "
        "without end, and count and rate have no effect"
    )  # fmt: skip
    pause: Seconds = Field(
        0.4, description="a mean number of seconds, 0 to 60, between an answer and the user's next request"
    )
    quiet_users: Users = Field(
        0, description="a whole number of the users, 0 to 256, that belong to the client 'quiet'; the others then belong "
        "to 'loud'"
    )  # fmt: skip
    prompts: Literal["short", "long", "shared"] = Field(
        "short", description="'short', 'long' (every fourth prompt has hundreds of tokens) or 'shared' (three of four "
        "begin with the same hundreds of tokens); the latter two need users"
    )  # fmt: skip
    lease: Seconds = Field(
        0.0, description="a number of seconds, 0 to 60, without GET /load after which users end; 0 for no such limit"
    )
    replace: f.Flag = Field(
        False, description="true to replace a load that is active; its open requests are still answered"
    )

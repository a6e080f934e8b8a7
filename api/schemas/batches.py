"""The schema of POST /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictStr

from api.schemas import fields as f

MOST_METADATA = 16
Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Key = Annotated[StrictStr, Field(max_length=64)]
Value = Annotated[StrictStr, Field(max_length=512)]


class ExpiresAfter(BaseModel):
    """For how many seconds a file is kept: from an hour to 30 days, as OpenAI's."""

    anchor: Literal["created_at"] = Field(description='"created_at"')
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)] = Field(description="a whole number from 3,600 to 2,592,000")


class BatchRequest(BaseModel):
    """POST /v1/batches: compute the requests of an uploaded file."""

    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=128)] = Field(
        description="the id of a file that was uploaded with the purpose batch"
    )
    endpoint: Endpoint = Field(description='"/v1/chat/completions" or "/v1/completions"')
    completion_window: Annotated[StrictStr, Field(pattern=r"^[1-9][0-9]{0,2}h$")] = Field(
        description='a number of hours from 1h to 999h, such as "24h"'
    )
    output_expires_after: ExpiresAfter | None = Field(
        None, description='an object such as {"anchor": "created_at", "seconds": 86400}'
    )
    metadata: Annotated[dict[Key, Value], Field(max_length=MOST_METADATA), f.at_most(MOST_METADATA)] | None = Field(
        None, description=f"at most {MOST_METADATA} strings by name"
    )

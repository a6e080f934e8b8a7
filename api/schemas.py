"""What a request may say, checked before it takes a place in the queue: strict types, finite numbers, bounds."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr


def _whole(value: Any) -> Any:
    """5.0 is 5; true is no number and "5" is no integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        return int(value)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if isinstance(value, int) and abs(value) > 1 << 63:
        raise ValueError("must be a number of reasonable size")
    return float(value)


def _digits(value: Any) -> Any:
    """The original passed num_tokens through int(), so that "10" was 10."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    return _whole(value)


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], BeforeValidator(_list), Field(max_length=4)]
INT64 = 1 << 63


class InferenceRequest(BaseModel):
    """The original's request with its two fields, and what has been added to it.

    The descriptions complete the sentence "Send ..." in the message of a refusal.
    """

    model_config = ConfigDict(extra="ignore")

    prompt: Annotated[StrictStr, Field(min_length=1)] = Field(
        description="a text of at least one character"
    )
    num_tokens: Annotated[int, BeforeValidator(_digits), Field(strict=True, ge=1)] = Field(
        description="a whole number of tokens to generate, at least 1"
    )
    temperature: Annotated[Number, Field(ge=0, le=2)] = Field(
        1.0, description="a number from 0 (greedy) to 2"
    )
    top_k: Annotated[Whole, Field(ge=-1, lt=1 << 31)] = Field(
        0, description="a whole number of candidates, 0 or -1 for all"
    )
    top_p: Annotated[Number, Field(gt=0, le=1)] = Field(
        1.0, description="a number above 0, 1 at most"
    )
    seed: Annotated[Whole, Field(ge=-INT64, lt=INT64)] | None = Field(
        None, description="a whole number of 64 bits"
    )
    stop: Stops = Field(
        [], description="a text, or a list of at most 4, each of 1 to 256 characters"
    )
    ignore_eos: StrictBool = Field(True, description="true or false, without quotes")
    timeout_s: Annotated[Number, Field(gt=0)] | None = Field(
        None, description="a number of seconds above 0"
    )
    priority: Annotated[Whole, Field(ge=-INT64, lt=INT64)] = Field(
        0, description="a whole number of 64 bits"
    )
    user: Annotated[StrictStr, Field(max_length=256)] = Field(
        "", description="a text of at most 256 characters"
    )

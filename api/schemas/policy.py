"""The schema of requests that switch the policy."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, StrictStr, WithJsonSchema

from api.http.errors import shown

MOST_OPTIONS = 32
LONGEST_VALUE = 256
OPTIONS = 'an object with options of the policy, as in {"aging": 30}'


def _options(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    if len(value) > MOST_OPTIONS:
        raise ValueError(f"must have at most {MOST_OPTIONS} options, not {len(value):,}")
    for name, option in value.items():
        is_text = isinstance(option, str) and len(option) <= LONGEST_VALUE
        if len(name) > LONGEST_VALUE or not (is_text or _is_number(option)):
            raise ValueError(
                f"must have numbers, true, false, or strings of at most {LONGEST_VALUE} characters, not "
                f"{shown(option)} for {shown(name)}"
            )
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1 << 63  # false for NaN


Options = Annotated[
    dict[str, Any],
    BeforeValidator(_options),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MOST_OPTIONS,
            "additionalProperties": {
                "anyOf": [{"type": "string", "maxLength": LONGEST_VALUE}, {"type": "number"}, {"type": "boolean"}]
            },
        }
    ),
]


class PolicyRequest(BaseModel):
    """PUT /policy: the policy to switch to."""

    policy: Annotated[StrictStr, Field(min_length=1, max_length=100)] = Field(
        description="the name of a policy, or loop+order as in dynamic+sjf"
    )
    options: Options = Field({}, description=OPTIONS)

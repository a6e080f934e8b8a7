"""The types of request fields: strict types, finite numbers and bounds.

A description completes the sentence "Send ..." in an error message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict, StrictBool, StrictStr, WithJsonSchema

from api.http.errors import shown

INT64 = 1 << 63
MOST_PROMPTS = 64
MOST_STOPS = 16
LONGEST_STOP = 256
MOST_BIASES = 300
MOST_IDS = 1 << 16
LONGEST_DIGITS = 64  # characters of a number in a string, with white space


def whole(value: Any) -> Any:
    """Convert 5.0 to 5; true is not a number and "5" is not an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < INT64:
        return int(value)
    return value


def _digits(value: Any) -> Any:
    """Convert "10" to 10, because the original passed num_tokens through int()."""
    if isinstance(value, str) and len(value) <= LONGEST_DIGITS and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        return int(value)
    return whole(value)


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def prompts(value: Any) -> Any:
    """Return the prompts of a string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if not isinstance(value[0], str | list):
        return [_ids(value)]
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"must have at most {MOST_PROMPTS} prompts, not {len(value):,}")
    if isinstance(value[0], list):
        return [_ids(entry) for entry in value]
    if not all(isinstance(entry, str) and entry for entry in value):
        raise ValueError("must have only non-empty strings")
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("must not mix strings with token ids")
    if not value:
        raise ValueError("must not have an empty list of token ids")
    if len(value) > MOST_IDS:
        raise ValueError(f"must have lists of at most {MOST_IDS:,} ids, not one of {len(value):,}")
    ids = [whole(token) for token in value]
    for token in ids:
        if type(token) is not int or not 0 <= token < INT64:
            raise ValueError(f"must have token ids of at least 0, not {shown(token)}")
    return ids


_TEXTS = {"type": "string", "minLength": 1}
_TOKEN = {"type": "integer", "minimum": 0, "x-below": "vocabulary"}
_TOKENS = {"type": "array", "items": _TOKEN, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        _TEXTS,
        {"type": "array", "items": _TEXTS, "minItems": 1, "maxItems": MOST_PROMPTS},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MOST_PROMPTS},
    ]
}
BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,18}$", "x-below": "vocabulary"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MOST_BIASES,
}


def at_most(most: int) -> BeforeValidator:
    """Return the check of the length of a list or object, before its items are checked."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"must have at most {most:,} items, not {len(value):,}")
        return value

    return BeforeValidator(check)


def without(path: str, is_other: Callable[[str], bool]) -> Callable[[Any, Any], Any]:
    """Return what removes the items with other types from a list, and names them among what has no effect."""

    def stays(item: Any, ignored: list[str]) -> bool:
        kind = item.get("type") if isinstance(item, dict) else None
        if not (isinstance(kind, str) and is_other(kind)):
            return True
        ignored.append(f"{path}.{item.get('name') or kind}")
        return False

    return lambda items, info: [i for i in items if stays(i, info.context)] if isinstance(items, list) else items


def _off(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


def _null(value: Any) -> None:
    raise ValueError("must be null")


# Bounds come before these, so that the OpenAPI document has them. With `fail_fast`, a list ends at its first fault.
INTEGER = BeforeValidator(whole)
NUMBER = Strict()  # true is no number either, nor is "5"

Flag = StrictBool
Off = Annotated[StrictBool, AfterValidator(_off), WithJsonSchema({"const": False})]  # 0 == False is for Python only
Null = Annotated[None, BeforeValidator(_null)]  # of a field that is only known to name the one to use
Seconds = Annotated[float, Field(allow_inf_nan=False, gt=0), NUMBER]
Pause = Annotated[float, Field(allow_inf_nan=False, gt=0, le=3600), NUMBER]
Int64 = Annotated[int, Field(strict=True, ge=-INT64, lt=INT64), INTEGER]
Text = Annotated[StrictStr, Field(min_length=1)]
Name = Annotated[StrictStr, Field(max_length=256)]
FunctionName = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Adapter = Annotated[StrictStr, Field(min_length=1, max_length=128)]
RequestId = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
Prompts = Annotated[list[Any], BeforeValidator(prompts), WithJsonSchema(PROMPT_SCHEMA)]
_Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100), NUMBER]
_Biases = dict[Annotated[StrictStr, Field(pattern=r"^[0-9]{1,18}$")], _Bias]  # token ids are strings in JSON
Biases = Annotated[_Biases, at_most(MOST_BIASES), WithJsonSchema(BIAS_SCHEMA)]
Length = Annotated[int, Field(strict=True, ge=1, json_schema_extra={"x-below": "context"}), INTEGER]
Digits = Annotated[Length, BeforeValidator(_digits)]

StopText = Annotated[StrictStr, Field(min_length=1, max_length=LONGEST_STOP)]
StopList = Annotated[list[StopText], Field(fail_fast=True, max_length=MOST_STOPS), at_most(MOST_STOPS)]
_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}]}
Stops = Annotated[StopList, BeforeValidator(_list), WithJsonSchema(_STOPS)]
Token = Annotated[int, Field(strict=True, ge=0, lt=INT64), INTEGER, WithJsonSchema(_TOKEN)]
Ids = Annotated[list[Token], Field(fail_fast=True, max_length=MOST_IDS), at_most(MOST_IDS)]

Temperature = Annotated[float, Field(allow_inf_nan=False, ge=0, le=2), NUMBER]
TopP = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1), NUMBER]
TopK = Annotated[int, Field(strict=True, ge=-1, lt=1 << 31), INTEGER]
MinP = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1), NUMBER]
Penalty = Annotated[float, Field(allow_inf_nan=False, ge=-2, le=2), NUMBER]
Above0 = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1e6), NUMBER]
Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 31), INTEGER]
Scores = Annotated[int, Field(strict=True, ge=0, le=5), INTEGER]

TEMPERATURE = "a number from 0 (greedy) to 2"
TOP_P = "a number above 0 and at most 1"
TOP_K = "a whole number of candidates, or 0 or -1 for all"
SEED = "a 64-bit whole number"
STOP = f"a string, or a list of at most {MOST_STOPS} strings, each of 1 to {LONGEST_STOP} characters"
FLAG = "true or false, without quotes"
USER = "a string of at most 256 characters"
SECONDS = "a number of seconds above 0"
PROMPT = "a non-empty string"
PENALTY = "a number from -2 to 2"
MODEL = "the name of the served model or of an adapter, or leave it out"
FUNCTION_NAME = "1 to 64 characters: letters, digits and _ . -"
ADAPTER = "the name of an adapter, or leave it out"
KEPT_TOKENS = "a whole number of tokens to keep, at least 1"

"""From the bytes of a body to a checked object: limits, JSON without surprises, plain words for what is wrong."""

from __future__ import annotations

import json
import math
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from flask import Request
from pydantic import BaseModel, ValidationError

from api.errors import ApiError, shown

LIMIT = 1 << 20  # bytes
DEPTH = 32  # of brackets
Schema = TypeVar("Schema", bound=BaseModel)


def read(request: Request) -> bytes:
    """Return the body, counted while it is read: a chunked one has no length to trust."""
    if request.headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
        raise ApiError(
            "the body has a Content-Encoding. Send it as plain JSON, uncompressed", status=415
        )
    too_large = ApiError(
        f"the body is larger than {LIMIT:,} bytes. Send a shorter prompt", status=413
    )
    if (request.content_length or 0) > LIMIT:
        raise too_large
    body = bytearray()
    while piece := request.stream.read(LIMIT + 1 - len(body)):
        body += piece
        if len(body) > LIMIT:
            raise too_large
    return bytes(body)


def parse(body: bytes, example: str) -> dict[str, Any]:
    """Return the one JSON object in `body`; ApiError with line and column, or an example when it is empty."""
    if not body.strip():
        raise ApiError(f"the body is empty. Send a JSON object such as {example}")
    try:
        text = body.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8 at byte {error.start}. Send JSON in UTF-8") from None
    _check_depth(text)
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise ApiError(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
            f"Send a JSON object such as {example}"
        ) from None
    except ValueError as error:  # an integer of thousands of digits
        raise ApiError(
            f"the body holds a number that is too long: {str(error).partition(';')[0][:80]}. "
            "Send a shorter one"
        ) from None
    if not isinstance(value, dict):
        raise ApiError(f"the body is {shown(value)}, must be a JSON object such as {example}")
    return value


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEPTH:
        return
    depth = 0
    in_string = escaped = False
    for c in text:
        if in_string:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == '"':
                in_string = False
        elif c == '"':
            in_string = True
        elif c in "[{":
            depth += 1
            if depth > DEPTH:
                raise ApiError(f"the body is nested deeper than {DEPTH} levels. Send a flat object")
        elif c in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ApiError(f"the key {shown(twice)} is there twice. Send it once", param=twice[:100])
    return result


def _not_finite(name: str) -> NoReturn:
    raise ApiError(f"the body holds {shown(name)}, numbers must be finite. Send a finite number")


def _finite(text: str) -> float:
    """Return a number with a point or an exponent; 1e999 is infinite and refused."""
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def validate(schema: type[Schema], fields: dict[str, Any]) -> tuple[Schema, list[str]]:
    """Return the checked object and the names of fields nobody knows; null is as good as absent."""
    known = {name for n, f in schema.model_fields.items() for name in (n, f.alias) if name}
    ignored = [name for name in fields if name not in known]
    given = {name: value for name, value in fields.items() if name in known and value is not None}
    nulls = [
        n for n, f in schema.model_fields.items() if f.is_required() and fields.get(n, 0) is None
    ]
    try:
        return schema.model_validate(given | dict.fromkeys(nulls)), ignored
    except ValidationError as error:
        raise _plain_words(error, schema, ignored) from None


def _plain_words(error: ValidationError, schema: type[Schema], ignored: list[str]) -> ApiError:
    """Say of the first faults what was sent, the bound it breaks, and what to send."""
    faults = error.errors(include_url=False, include_context=True)
    texts = []
    for fault in faults[:5]:
        name = ".".join(str(part) for part in fault["loc"])
        field = schema.model_fields.get(str(fault["loc"][0])) if fault["loc"] else None
        remedy = f"Send {field.description}" if field and field.description else "Send another"
        if fault["type"] == "missing":
            near = get_close_matches(name, ignored, 1)
            guess = f" Did you mean it by {near[0]!r}?" if near else ""
            texts.append(f"{name} is missing.{guess} {remedy}")
        else:
            reason = _reason(fault["msg"])
            texts.append(f"{name} is {shown(fault['input'])}, {reason}. {remedy}")
    if len(faults) > 5:
        texts.append(f"and {len(faults) - 5} more")
    param = str(faults[0]["loc"][0]) if faults[0]["loc"] else None
    return ApiError(". ".join(texts), param=param)


def _reason(message: str) -> str:
    """Return pydantic's words as the end of a sentence of ours."""
    message = message.removeprefix("Value error, ").removeprefix("Input ").replace("should", "must")
    return f"{message[:1].lower()}{message[1:]}"

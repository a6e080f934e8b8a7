"""Reads and validates bodies: limits, strict JSON, and errors that name the value, the bound and the remedy."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from flask import Request, Response
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from api.http import large
from api.http.errors import ApiError, shown
from api.schemas.unsupported import Unsupported, changes_nothing
from config import nearest
from serving.headroom import check_headroom

log = logging.getLogger(__name__)
LIMIT = 1 << 20  # bytes
BODY = "effective_batching.body"  # in the WSGI environment: the body, for the next engine if this one fails
DEPTH = 32  # nested brackets
MOST_VALUES = 1 << 17  # in a body: 64 prompts of 1,024 token ids are half of it
MOST_KEYS = 1 << 14  # with lists and objects, which cost more to build than plain values
MOST_NAMES = 100  # unknown fields that an answer names
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
Schema = TypeVar("Schema", bound=BaseModel)


def read(request: Request) -> bytes:
    """Return the body, counted while it is read, because a chunked body states no length.

    Raise MemoryError, before the body is read, when there is no memory for what follows: validating and tokenizing.
    """
    check_headroom()
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("identity", ""):
        raise ApiError(
            f"Content-Encoding {shown(encoding)} is not supported. Send the body as plain, uncompressed JSON",
            status=415,
        )
    body, expected = bytearray(), request.content_length or 0
    if expected > LIMIT:
        raise _too_large()
    while (not expected or len(body) < expected) and (piece := _piece(request, LIMIT + 1 - len(body))):
        body += piece
        if len(body) > LIMIT:
            raise _too_large()
    if len(body) < expected:
        raise ApiError(
            f"the body ended after {len(body):,} of {expected:,} bytes. Send as many bytes as Content-Length states"
        )
    whole = request.environ[BODY] = bytes(body)
    return whole


def _too_large() -> ApiError:
    """Return the error, to be raised at once: a local variable would keep it, its frame and the body until the next GC."""
    return ApiError(f"the body is larger than {LIMIT:,} bytes. Send a shorter prompt", status=413)


def _piece(request: Request, most: int) -> bytes:
    """Return the next bytes of the body, or none at its end; raise 408 if they do not arrive in time."""
    try:
        return request.stream.read(most)
    except BlockingIOError:
        raise ApiError(
            "timed out while reading the body. Send it without pauses, or raise --receive-timeout",
            type="timeout_error",
            status=408,
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # classes of the HTTP server: a malformed chunk or a broken connection
        log.info("cannot read a request body: %r", error)
        raise ApiError(
            "the body is truncated, or its chunks are malformed. Send the complete body with its Content-Length"
        ) from None


def parse(body: bytes, example: str) -> dict[str, Any]:
    """Return the JSON object in `body`; raise ApiError with line and column of a fault.

    Large bodies are parsed one at a time: in parallel they would take as long, and more memory.
    """
    with large.serialize_large(len(body)):
        return _parse(body, example)


def _parse(body: bytes, example: str) -> dict[str, Any]:
    if not body.strip():
        raise ApiError(f"the body is empty. Send a JSON object such as {example}")
    try:
        text = body.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid UTF-8 at byte {error.start}. Send JSON in UTF-8") from None
    check_structure(body)
    try:
        # The hooks are Python calls, between which other threads can run.
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite, parse_int=_whole
        )
    except json.JSONDecodeError as error:
        raise ApiError(
            f"invalid JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
            f"Send a JSON object such as {example}"
        ) from None
    if not isinstance(value, dict):
        raise ApiError(f"the body is {shown(value)}, but must be a JSON object such as {example}")
    return value


def check_structure(body: bytes) -> None:
    """Raise ApiError for a body that is nested too deeply or has too many values, before any of them is built.

    The counts are exact up to the first syntax error, and nothing after it is built.
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= DEPTH and opened + body.count(b":") <= MOST_KEYS and body.count(b",") < MOST_VALUES:
        return  # even if none of these are in strings
    most_quotes = 2 * (MOST_VALUES + MOST_KEYS)
    pieces = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', most_quotes)
    bare = b"".join(pieces[::2])  # the text between the strings
    brackets = bare.translate(None, NO_BRACKETS)
    depth = 0
    for bracket in brackets[: 2 * MOST_KEYS]:
        depth += 1 if bracket in b"[{" else -1
        if depth > DEPTH:
            raise ApiError(f"the body is nested more than {DEPTH} levels deep. Send a flatter object")
    keys = bare.count(b":") + bare.count(b"[") + bare.count(b"{")
    for what, count, most in (
        ("keys, lists and objects", keys, MOST_KEYS),
        ("values", bare.count(b",") + 1, MOST_VALUES),
    ):
        if count > most:
            raise ApiError(f"the body has {count:,} {what} (limit {most:,}). Send fewer")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ApiError(f"the key {shown(twice)} appears twice. Send it once", param=twice[:100])
    return result


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # thousands of digits
        raise ApiError(
            f"the body has a number of {len(text):,} digits, which is too long. Send a shorter number"
        ) from None


def _not_finite(name: str) -> NoReturn:
    raise ApiError(f"the body has {shown(name)}, but numbers must be finite. Send a finite number")


def _finite(text: str) -> float:
    """Return a number with a point or an exponent; refuse 1e999, which is infinite."""
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def take(request: Request, example: str, any_type: bool = False) -> dict[str, Any]:
    """Return the JSON object of the request; without `any_type` its content type must be JSON."""
    kind = request.mimetype
    if not any_type and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"the content type is {shown(kind or 'absent')}, but must be application/json. "
            "Send the header 'Content-Type: application/json' (curl: -H 'Content-Type: application/json')",
            status=415,
        )
    return parse(read(request), example)


def name_ignored(response: Response, names: Iterable[str]) -> Response:
    """List ignored fields in a header, in characters that a header can carry."""
    if text := ", ".join(islice(names, MOST_NAMES)):
        header = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:1000])
        response.headers["X-Ignored-Params"] = header
    return response


def validate(schema: type[Schema], fields: dict[str, Any]) -> tuple[Schema, list[str]]:
    """Return the validated object and the names of the first unknown fields; null counts as absent.

    Raise ApiError for a wrong field, and for one that the schema names as unsupported with a value that changes the answer.
    """
    ignored: list[str] = []
    try:
        return schema.model_validate(_known(schema, fields, ignored), context=ignored), ignored
    except ValidationError as error:
        raise _validation_error(error, schema, ignored) from None


def _known(schema: type[BaseModel], fields: Any, ignored: list[str], path: str = "") -> Any:
    """Return the fields that the schema knows and that are not null, also within nested objects."""
    if not isinstance(fields, dict):
        return fields
    own = schema.model_fields
    if unknown := [name for name in fields if name not in own]:
        unsupported = getattr(schema, "unsupported", {})
        refuse_unsupported(unsupported, {name: fields[name] for name in unknown}, path)
        ignored += islice((path + name for name in unknown if name not in unsupported), MOST_NAMES - len(ignored))
    known, objects = {}, _objects(schema)
    for name, value in fields.items():
        field = own.get(name)
        if field is None or (value is None and not field.is_required()):
            continue
        inner = objects.get(name)
        known[name] = value if inner is None else _known(inner, value, ignored, f"{path}{name}.")
    return known


def refuse_unsupported(unsupported: Unsupported, fields: Mapping[str, Any], path: str, by: str = "") -> None:
    """Raise ApiError for a field that is unsupported with its value."""
    for name, value in fields.items():
        if name in unsupported and not changes_nothing(value, unsupported[name]):
            raise ApiError(
                f"{path}{name} is {shown(value)}, which is not supported{by}. Leave it out",
                param=f"{path}{name}".partition(".")[0],
            )


@cache
def _objects(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the schema of each field that is an object or an optional object."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in schema.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)] if get_origin(field.annotation) is not list else []
        found.update((name, kind) for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return found


def _validation_error(error: ValidationError, schema: type[BaseModel], ignored: list[str]) -> ApiError:
    """Return an error with value, bound and remedy of the first faults."""
    faults = error.errors(include_url=False, include_context=True)
    texts = []
    for fault in faults[:5]:
        name = ".".join(str(part) for part in fault["loc"])
        field = _field_at(schema, fault["loc"])
        remedy = f"Send {field.description}" if field and field.description else "Send a valid value"
        if fault["type"] == "missing":
            guess = nearest(name, ignored, "Did you misspell it as")
            texts.append(f"{name} is missing.{guess} {remedy}")
        else:
            value = shown(fault["input"])
            texts.append(f"{name} is {value}, but {_reason(fault['msg'])}. {remedy}")
    if len(faults) > 5:
        texts.append(f"and {len(faults) - 5} more")
    param = str(faults[0]["loc"][0]) if faults[0]["loc"] else None
    return ApiError(". ".join(texts), param=param)


def _field_at(schema: type[BaseModel], place: tuple[int | str, ...]) -> FieldInfo | None:
    """Return the innermost field of a path such as ("parameters", "stop", 3)."""
    name = str(place[0]) if place else ""
    field, inner = schema.model_fields.get(name), _objects(schema).get(name)
    within = _field_at(inner, place[1:]) if inner is not None else None
    return within or field


def _reason(message: str) -> str:
    """Return pydantic's message as a clause: "must be ..."."""
    message = re.sub(r"^\w+ should ", "must ", message.removeprefix("Value error, "))
    message = re.sub(r" after validation, not \d+$", "", message)
    message = re.sub(r"a valid dictionary( or instance of \w+)?$", "an object", message)
    return f"{message[:1].lower()}{message[1:]}"

"""The OpenAPI 3.1 document, built from the `OPERATIONS` that each module declares beside its handlers.

This module must not know what any route does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.http import errors

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"
WHAT = {
    200: "success",
    400: "the body or a value is invalid; the message explains the problem and the remedy",
    401: "the API key is missing or wrong",
    403: "the request came from a page of another site",
    404: "not found",
    405: "the method is not allowed on this path",
    413: "the body is too large",
    415: "the content type is not supported",
    422: "the body or a value is invalid; the message explains the problem and the remedy",
    424: "the model failed on this request",
    429: "the server is full; retry after the seconds in Retry-After",
    499: "the request was cancelled",
    500: "the model failed on this request",
    503: "the server is loading, shutting down or has failed",
    504: "the request timed out",
    529: "the server is full, loading, shutting down or has failed; retry after the seconds in Retry-After",
}
ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
TGI_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    "required": ["error", "error_type"],
}
MESSAGES_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
OLLAMA_ERROR: Schema = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
ERRORS = {  # by dialect
    "openai": ("Error", ERROR), "tgi": ("TgiError", TGI_ERROR), "messages": ("MessagesError", MESSAGES_ERROR),
    "ollama": ("OllamaError", OLLAMA_ERROR),
}  # fmt: skip
EVENTS = "text/event-stream"
IGNORED: Schema = {
    "description": "the fields and query parameters that had no effect, separated by commas; absent if there are none",
    "schema": {"type": "string"},
}
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
TOKEN_COUNTS = ("num_tokens", "max_tokens", "max_completion_tokens", "max_new_tokens")
BY_VALUE = ("default", "const", "enum", "example", "examples")  # keywords whose content is not a schema
CHANGING = ("post", "put", "delete")  # methods that pages of other sites may not use
GENERATING = (400, 404, 413, 415, 429, 499, 500, 503, 504)


@dataclass(frozen=True)
class Operation:
    """The description of one method of one path (`/requests/{id}`).

    `answer` is the schema of the answer with status 200, whose content type is `media`. `also` has the schemas of its
    other content types, and `answers` those of other statuses, if they are not errors in the usual form. An operation
    that `generates` takes a place in the queue before its body is read.
    """

    method: str
    path: str
    summary: str
    tag: str
    body: type[BaseModel] | Schema | None = None
    example: Any = None
    answer: type[BaseModel] | Schema | None = None
    media: str = "application/json"
    also: Mapping[str, Schema] = field(default_factory=dict)
    streams: bool = False  # the answer can also be text/event-stream
    answers: Mapping[int, Schema] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    query: Mapping[str, Schema] = field(default_factory=dict)
    generates: bool = False
    form: Schema | None = None  # of a body that is a form with a file, in place of `body`
    any_body: bool = False  # any other body is accepted as well
    unlisted: str = ""  # why tools that call every path must not find it: it is described beside the paths

    @property
    def id(self) -> str:
        """The operationId."""
        words = re.sub(r"\W+", "_", self.path).strip("_") or "root"
        return f"{self.method}_{words}"


def document(
    operations: Sequence[Operation],
    version: str,
    open_paths: frozenset[str],
    keyed: bool,
    *,
    context: int | None,
    vocabulary: int | None,
) -> dict[str, Any]:
    """Return the OpenAPI document; with `keyed`, every path except the open ones requires the key.

    `context` and `vocabulary` are numbers of tokens, None until the model is loaded.
    """
    words = [f"{op.method.upper()} {op.path} ({op.unlisted}): {op.summary}" for op in operations if op.unlisted]
    models = {
        model
        for op in operations
        for model in (op.body, op.answer)
        if isinstance(model, type) and issubclass(model, BaseModel)
    }
    ordered = sorted(models, key=lambda model: model.__name__)
    references, definitions = models_json_schema([(model, "validation") for model in ordered], ref_template=REFERENCE)
    named = {model: reference for (model, _), reference in references.items()}
    schemas = {name: _nullable(_written(s, vocabulary), context) for name, s in definitions.get("$defs", {}).items()}
    schemas |= dict(ERRORS.values())
    paths: dict[str, dict[str, Any]] = {}
    unlisted: dict[str, dict[str, Any]] = {}
    for op in operations:
        item = _operation(op, named, keyed and op.path not in open_paths)
        (unlisted if op.unlisted else paths).setdefault(op.path, {})[op.method] = item
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "effective-batching", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if words:
        result["info"]["description"] = f"Not listed below: {'; '.join(words)}."
        result["x-unlisted"] = unlisted
    if keyed:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return result


def _operation(op: Operation, named: Mapping[Any, Any], keyed: bool) -> dict[str, Any]:
    def schema(form: Any) -> Any:
        return named[form] if isinstance(form, type) else form

    has_schema = op.answer is not None and op.media != EVENTS  # no schema describes an event
    answered: dict[str, Any] = {op.media: {"schema": schema(op.answer)} if has_schema else {}}
    answered |= {media: {"schema": form} for media, form in op.also.items()}
    if op.streams:
        answered[EVENTS] = {}
    responses: dict[str, Any] = {"200": {"description": WHAT[200], "content": answered}}
    if op.body is not None:
        responses["200"]["headers"] = {"X-Ignored-Params": IGNORED}
    for code, form in op.answers.items():
        responses[str(code)] = _response(code, form)
    dialect = errors.dialect(op.method.upper(), op.path)
    statuses = errors.STATUSES.get(dialect, {})
    common = [statuses.get(code, code) for code in GENERATING] if op.generates else []
    extra = ((403,) if op.method in CHANGING else ()) + ((401,) if keyed else ())
    error = {"$ref": REFERENCE.format(model=ERRORS[dialect][0])}
    for code in sorted({*common, *extra, *op.errors}):
        responses.setdefault(str(code), _response(code, error))
    result: dict[str, Any] = {"operationId": op.id, "summary": op.summary, "tags": [op.tag], "responses": responses}
    if parameters := _parameters(op):
        result["parameters"] = parameters
    if op.body is not None:
        content: dict[str, Any] = {"schema": schema(op.body)}
        if op.example is not None:
            content["example"] = op.example
        if op.any_body:  # a requestBody would say that no other body is valid
            result["x-body"] = content
        else:
            result["requestBody"] = {"required": True, "content": {"application/json": content}}
    if op.form is not None:
        result["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": op.form}}}
    if keyed:
        result["security"] = [{"key": []}]
    return result


def _response(code: int, form: Any) -> dict[str, Any]:
    headers = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return {
        "description": WHAT[code],
        "content": {"application/json": {"schema": form}},
        **({"headers": headers} if code in (429, 503, 529) else {}),
    }


def _parameters(op: Operation) -> list[dict[str, Any]]:
    words = re.findall(r"{(\w+)}", op.path)
    text = {"type": "string", "minLength": 1}
    return [{"name": w, "in": "path", "required": True, "schema": text} for w in words] + [
        {"name": name, "in": "query", "schema": schema} for name, schema in op.query.items()
    ]


def _written(schema: Any, vocabulary: int | None) -> Any:
    """Return a schema in JSON Schema's keywords, with what the served model takes.

    pydantic leaves its own keywords where a validator comes first. `x-token-id` marks token ids.
    """
    if isinstance(schema, list):
        return [_written(item, vocabulary) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[Any, Any] = {}
    for word, value in schema.items():
        if word == "properties":
            result[word] = {name: _written(inner, vocabulary) for name, inner in value.items()}
        elif word != "x-token-id":
            result[BOUNDS.get(word, word)] = value if word in BY_VALUE else _written(value, vocabulary)
    if "x-token-id" in schema and vocabulary is not None:
        if "pattern" in schema:
            result["pattern"] = f"^[0-9]{{1,{len(str(vocabulary - 1)) - 1}}}$"
        else:
            result["maximum"] = vocabulary - 1
    return result


def _nullable(schema: dict[str, Any], context: int | None) -> dict[str, Any]:
    """Return the schema of an object in which null counts as absent, as in `body.validate`."""
    required = schema.get("required", ())
    properties = {}
    for name, value in schema.get("properties", {}).items():
        for kind in value.get("anyOf", [value]) if name in TOKEN_COUNTS else ():
            if kind.get("type") == "integer" and context is not None:
                kind.setdefault("maximum", context - 1)  # a prompt has at least one
        optional = name not in required and not _takes_null(value)
        properties[name] = _or_null(value) if optional else value
    return schema | ({"properties": properties} if properties else {})


def _takes_null(schema: Any) -> bool:
    kinds = [schema, *schema.get("anyOf", ())]
    return any(kind.get("type") == "null" or "null" in kind.get("type", ()) for kind in kinds)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    words = {k: v for k, v in schema.items() if k in ("title", "description", "default")}
    rest = {k: v for k, v in schema.items() if k not in words}
    kinds = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return words | {"anyOf": [*kinds, {"type": "null"}]}

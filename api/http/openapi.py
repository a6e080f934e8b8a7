"""The OpenAPI 3.1 document, built from what each module says of its routes where it declares them.

This module must not know what any route does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import GenericAlias
from typing import Any, Literal, TypeVar

from flask import Blueprint
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

# pydantic, which needs this package, accepts those of `typing` only from Python 3.12 on.
from typing_extensions import NotRequired as NotRequired
from typing_extensions import Required as Required
from typing_extensions import TypedDict as TypedDict

from api.http import errors

Object = dict[str, Any]  # whose members the document does not list
REFERENCE = "#/components/schemas/{model}"
WHAT = {
    200: "success",
    400: "the body or a value is invalid; the message explains the problem and the remedy",
    401: "the API key is missing or wrong",
    403: "the request came from a page of another site",
    404: "not found",
    409: "another client has leased the policy, or the lease has ended",
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
OpenAIFault = TypedDict("OpenAIFault", {"message": str, "type": str, "param": str | None, "code": str | None})
MessagesFault = TypedDict("MessagesFault", {"type": str, "message": str})
OpenAIError = TypedDict("OpenAIError", {"error": OpenAIFault})
TgiError = TypedDict("TgiError", {"error": str, "error_type": str})
MessagesError = TypedDict("MessagesError", {"type": Literal["error"], "error": MessagesFault})
OllamaError = TypedDict("OllamaError", {"error": str})
ERRORS = {"openai": OpenAIError, "tgi": TgiError, "messages": MessagesError, "ollama": OllamaError}  # by dialect
JSON = "application/json"
EVENTS = "text/event-stream"
IGNORED = {
    "description": "the fields and query parameters that had no effect, separated by commas; absent if there are none",
    "schema": {"type": "string"},
}
CHANGING = ("post", "put", "delete")  # methods that pages of other sites may not use
READING = (400, 413, 415)  # statuses of requests with a body
GENERATING = (400, 404, 413, 415, 429, 499, 500, 503, 504)


@dataclass(frozen=True)
class Operation:
    """The description of one method of one path (`/requests/{id}`).

    `answer` is the type of the answer with status 200, or the types by content type, None for one that no schema
    describes. `answers` has those of other statuses, if they are not errors in the usual form. An operation that
    `generates` takes a place in the queue before its body is read.
    """

    method: str
    path: str
    summary: str
    tag: str
    body: Any = None
    example: Any = None
    answer: Any = None
    streams: bool = False  # the answer can also be text/event-stream
    answers: Mapping[int, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    query: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = False
    form: Any = None  # of a body that is a form with a file, in place of `body`

    @property
    def contents(self) -> dict[str, Any]:
        """The types of the answer with status 200 by content type."""
        contents = self.answer if isinstance(self.answer, Mapping) else {JSON: self.answer}
        return {**contents, **({EVENTS: None} if self.streams else {})}


View = TypeVar("View", bound=Callable[..., Any])


class Routes:
    """The routes of a module, in a blueprint, and the `operations` that describe them, all with the same tag."""

    def __init__(self, name: str, tag: str, prefix: str = "") -> None:
        self.blueprint, self.operations = Blueprint(name, __name__), list[Operation]()
        self._tag, self._prefix = tag, prefix

    def _add(self, method: str, rule: str, summary: str, described: dict[str, Any]) -> Callable[[View], View]:
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", self._prefix + rule)
        self.operations.append(Operation(method, path, summary, self._tag, **described))
        return self.blueprint.route(self._prefix + rule, methods=[method])

    def get(self, rule: str, summary: str, **described: Any) -> Callable[[View], View]:
        """Return the decorator of a handler; `described` are the other fields of its `Operation`."""
        return self._add("get", rule, summary, described)

    def post(self, rule: str, summary: str, **described: Any) -> Callable[[View], View]:
        return self._add("post", rule, summary, described)

    def put(self, rule: str, summary: str, **described: Any) -> Callable[[View], View]:
        return self._add("put", rule, summary, described)

    def delete(self, rule: str, summary: str, **described: Any) -> Callable[[View], View]:
        return self._add("delete", rule, summary, described)


class Generator(GenerateJsonSchema):
    """Writes schemas in which null counts as absent, as in `body.validate`, without titles of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave titles to objects: some generators of clients name classes by them."""
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Allow null; a default that is an object is left out, as some generators of clients refuse it."""
        found = super().default_schema(schema)
        default = {"default": found.pop("default")} if "default" in found else {}
        optional = self.get_flattened_anyof([found, {"type": "null"}])
        return optional if isinstance(default.get("default"), dict) else optional | default


def document(
    operations: Sequence[Operation], version: str, open_paths: frozenset[str], keyed: bool, limits: Mapping[str, int]
) -> dict[str, Any]:
    """Return the OpenAPI document; with `keyed`, every path except the open ones requires the key.

    `limits` are the numbers of tokens `context` and `vocabulary`, as soon as the model is loaded.
    """
    kinds = dict.fromkeys(ERRORS.values()) | dict.fromkeys(
        kind
        for op in operations
        for kind in (op.body, op.form, *op.contents.values(), *op.answers.values(), *op.query.values())
        if kind is not None
    )
    written = json.loads(_schemas(*kinds), object_hook=partial(_bounded, limits))
    schemas = dict(zip(kinds, written["prefixItems"]))
    paths: dict[str, dict[str, Any]] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method] = _operation(op, schemas, keyed and op.path not in open_paths)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "effective-batching", "version": version},
        "paths": paths,
        "components": {"schemas": written["$defs"]},
    }
    if keyed:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return result


@cache
def _schemas(*kinds: Any) -> str:
    """Return the schemas of types, and what they refer to, as JSON; it takes a while."""
    together: Any = GenericAlias(tuple, kinds)
    return json.dumps(TypeAdapter(together).json_schema(ref_template=REFERENCE, schema_generator=Generator))


def _bounded(limits: Mapping[str, int], schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the limit of the served model that `x-below` names."""
    limit = limits.get(schema.pop("x-below", ""))
    if limit is not None and "pattern" in schema:
        return schema | {"pattern": f"^[0-9]{{1,{len(str(limit - 1)) - 1}}}$"}
    return schema if limit is None else schema | {"maximum": limit - 1}


def _operation(op: Operation, schemas: Mapping[Any, Any], keyed: bool) -> dict[str, Any]:
    def content(kind: Any) -> dict[str, Any]:
        return {} if kind is None else {"schema": schemas[kind]}

    answered = {media: content(kind) for media, kind in op.contents.items()}
    responses: dict[str, Any] = {"200": {"description": WHAT[200], "content": answered}}
    if op.body is not None:
        responses["200"]["headers"] = {"X-Ignored-Params": IGNORED}
    dialect = errors.dialect(op.method.upper(), op.path)
    statuses = errors.STATUSES.get(dialect, {})
    common = GENERATING if op.generates else READING if op.body or op.form else ()
    extra = ((403,) if op.method in CHANGING else ()) + ((401,) if keyed else ())
    for code in sorted({*(statuses.get(code, code) for code in common), *extra, *op.errors, *op.answers}):
        responses[str(code)] = {
            "description": WHAT[code],
            "content": {JSON: content(op.answers.get(code, ERRORS[dialect]))},
        }
        if code in (429, 503, 529):
            responses[str(code)]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    words = re.sub(r"\W+", "_", op.path).strip("_") or "root"
    result: dict[str, Any] = {
        "operationId": f"{op.method}_{words}", "summary": op.summary, "tags": [op.tag], "responses": responses,
    }  # fmt: skip
    text = {"type": "string", "minLength": 1}
    in_path = re.findall(r"{(\w+)}", op.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in in_path]
    parameters += [{"name": name, "in": "query", **content(kind)} for name, kind in op.query.items()]
    if parameters:
        result["parameters"] = parameters
    sent = content(op.body) | ({} if op.example is None else {"example": op.example})
    if op.body or op.form:
        media = {JSON: sent} if op.body else {"multipart/form-data": content(op.form)}
        result["requestBody"] = {"required": True, "content": media}
    if keyed:
        result["security"] = [{"key": []}]
    return result

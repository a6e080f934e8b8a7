"""The largest bodies: each field of each route with the largest value of every kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel

LIMIT = 1 << 20  # bytes of a body
MOST_VALUES, MOST_KEYS = 131_000, 16_000  # just fewer than the server reads
MARK = "@here@"


class Hostile(NamedTuple):
    """A body of a route, and which field has which kind of value."""

    path: str
    method: str
    name: str
    body: bytes


def repeated(item: str, room: int, most: int = LIMIT) -> str:
    """Return a list of equal items: as many as fit, or `most`."""
    return "[" + ",".join([item] * min(most, (room - 2) // (len(item) + 1))) + "]"


def keyed(most: int, *last: str) -> Callable[[int], str]:
    """Return a function that writes an object with this many keys, or as many as fit."""
    pairs = (f'"k{i}":1' for i in range(most))
    return lambda room: "{" + ",".join([*pairs, *last])[: room - 2].rpartition(",")[0] + "}"


KINDS: dict[str, Callable[[int], str]] = {
    "ones that fill the body": lambda room: repeated("1", room),
    "many ones": lambda room: repeated("1", room, MOST_VALUES),
    "many negative numbers": lambda room: repeated("-1", room, MOST_VALUES),
    "many fractions": lambda room: repeated("0.5", room, MOST_VALUES),
    "numbers of 4,300 digits": lambda room: repeated("1" * 4300, room),
    "many texts": lambda room: repeated('"ab"', room, MOST_VALUES),
    "many lists": lambda room: repeated("[]", room, MOST_KEYS),
    "lists that fill the body": lambda room: repeated("[]", room),
    "many objects": lambda room: repeated('{"a":1}', room, MOST_KEYS // 2),
    "many keys": lambda room: keyed(MOST_KEYS)(room),
    "a key twice among many": lambda room: keyed(MOST_KEYS, '"k9":1', '"":1')(room),
    "a key twice among 20,000": lambda room: keyed(20_000, '"k19999":1', '"":1')(room),
    "keys that fill the body": lambda room: keyed(LIMIT // 12)(room),
    "brackets": lambda room: "[" * (room // 2) + "]" * (room // 2),
    "a long text": lambda room: '"' + "a" * (room - 2) + '"',
    "a long text of spaces": lambda room: '"' + " " * (room - 2) + '"',
    "a long text of commas and brackets": lambda room: '"' + ",[{" * ((room - 2) // 3) + '"',
    "a long text of escapes": lambda room: '"' + '\\"' * ((room - 2) // 2) + '"',
    "control characters": lambda room: '"' + "\\u0001" * ((room - 2) // 6) + '"',
    "a text of 15,000 bytes": lambda room: '"' + "\\u0001" * 15_000 + '"',
    "a text of 130,000 bytes": lambda room: '"' + "qx" * 65_000 + '"',
    "65,000 ids": lambda room: repeated("199", room, 65_000),
    "64 lists of 1,024 ids": lambda room: repeated(repeated("199", room, 1024), room, 64),
}


def fields_of(operations: Any) -> Iterator[tuple[Any, tuple[str | int, ...]]]:
    """Yield each route that takes a body with the place of each field in it, and with one unknown field."""
    for operation in operations:
        schema = operation.body
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            yield from ((operation, place) for place in [*places(schema), ("unknown",)])


def hostile(operations: Any, route: str) -> Iterator[Hostile]:
    """Yield for each field of a route the largest body with each kind of value in it."""
    for operation, place in fields_of(operations):
        if operation.path == route:
            marked = json.dumps(put(copy.deepcopy(operation.example), place, MARK))
            for kind, make in KINDS.items():
                body = marked.replace(f'"{MARK}"', make(LIMIT - len(marked))).encode()
                yield Hostile(route, operation.method.upper(), f"{'.'.join(map(str, place))}: {kind}", body)


def places(schema: type[BaseModel]) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of a schema's fields, including those of inner objects and of a list's first object."""
    for name, field in schema.model_fields.items():
        yield (name,)
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if inner:
            first = (0,) if get_origin(field.annotation) is list else ()
            yield from ((name, *first, *place) for place in places(inner[0]))


def put(fields: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return an object with a value in a place of it."""
    inner = fields
    for part in place[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner[part]
    inner[place[-1]] = value
    return fields

"""JSON schemas with values that are valid and values that are not, and schemas that cannot be enforced."""

from __future__ import annotations

from typing import Any, NamedTuple

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


class Case(NamedTuple):
    """A schema with examples; keys of objects are in the order of the schema."""

    schema: Any
    valid: list[Any]
    invalid: list[Any]


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Return the schema of an object without other keys."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def text(**rules: Any) -> dict[str, Any]:
    """Return the schema of a string."""
    return {"type": "string", **rules}


def items(of: Any, **rules: Any) -> dict[str, Any]:
    """Return the schema of an array."""
    return {"type": "array", "items": of, **rules}


NODE = closed({"value": WHOLE, "children": items({"$ref": "#/$defs/node"})})
CALLS = {
    "anyOf": [
        closed({"name": {"const": "f"}, "arguments": closed({"x": WHOLE})}),
        closed({"name": {"const": "g"}, "arguments": closed({"s": TEXT})}),
    ]
}
# As agents' tools have them.
READ_FILE = closed(
    {
        "path": text(description="Absolute path"),
        "offset": {"type": "integer", "minimum": 0, "default": 0},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 2000, "default": 2000},
    },
    ["path"],
    title="read_file_arguments",
)
EDIT = closed(
    {
        "path": TEXT,
        "edits": items(
            closed({"old": text(minLength=1), "new": TEXT, "all": {"type": "boolean"}}, ["old", "new"]), minItems=1
        ),
    }
)
SEARCH = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "query": text(minLength=1, maxLength=400, description='A "quoted" query, such as </tool_call>'),
        "domains": items(text(format="hostname"), maxItems=3),
        "since": text(format="date"),
        "kind": {"type": "string", "enum": ["web", "news"], "default": "web"},
    },
    "required": ["query"],
    "additionalProperties": False,
}
WEATHER = closed({"city": TEXT, "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}], "default": None}}, ["city"])
EVENT = {
    "$defs": {"Who": closed({"name": TEXT, "mail": text(format="email")}), "When": text(format="date-time")},
    **closed({"title": TEXT, "at": {"$ref": "#/$defs/When"}, "who": items({"$ref": "#/$defs/Who"}, maxItems=5)}),
}
SHAPES = {
    "oneOf": [
        closed({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
        closed({"kind": {"const": "box"}, "width": WHOLE, "height": WHOLE}),
    ],
    "discriminator": {"propertyName": "kind"},
}
SQL = closed({"statement": text(pattern="^(SELECT|select) .+$"), "rows": {"type": "integer", "format": "int32"}})
POINTS = closed(
    {"points": items({"type": "array", "prefixItems": [{"type": "number"}] * 2, "items": False, "minItems": 2})}
)

CASES: dict[str, Case] = {
    "string": Case(TEXT, ["a", ""], [1, None]),
    "integer": Case(WHOLE, [3, -20, 0], ["3", 1.5, None]),
    "number": Case({"type": "number"}, [1.5, 3, -0.25, 1e30], ["x", True]),
    "boolean": Case({"type": "boolean"}, [True, False], [0, "true"]),
    "null": Case({"type": "null"}, [None], [0, ""]),
    "array": Case({"type": "array"}, [[], [1, "a", [None]]], [{}, "[]"]),
    "object": Case({"type": "object"}, [{}, {"a": {"b": [1]}}], [[], 1]),
    "anything": Case({}, [1, "a", {}, None, [True]], []),
    "true": Case(True, [1, "a", {}], []),
    "types": Case({"type": ["string", "null"]}, ["a", None], [1]),
    "closed": Case(closed({"a": TEXT, "b": WHOLE}), [{"a": "x", "b": 1}], [{"a": "x"}, {"a": 1, "b": 1}, {"a": "x", "b": 1, "c": 1}]),
    "optional": Case(closed({"a": TEXT, "b": WHOLE}, ["a"]), [{"a": "x"}, {"a": "x", "b": 2}], [{"b": 2}, {}]),
    "open": Case({"type": "object", "properties": {"a": WHOLE}}, [{}, {"a": 1}, {"a": 1, "z": "y"}], [{"a": "x"}]),
    "enum": Case({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2, False]),
    "const": Case({"const": {"k": [1]}}, [{"k": [1]}], [{"k": [2]}, {}]),
    "minimum": Case({"type": "integer", "minimum": 3, "maximum": 17}, [3, 17], [2, 18, -5]),
    "exclusive": Case({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1, -0.5]),
    "large numbers": Case({"type": "integer", "minimum": 10**15, "maximum": 10**18}, [10**16], [5, 10**19]),
    "multipleOf": Case({"type": "integer", "multipleOf": 5}, [10, 0], [7]),
    "length": Case(text(minLength=2, maxLength=4), ["ab", "abcd"], ["a", "abcde"]),
    "pattern": Case(text(pattern="^[a-z]+\\d$"), ["ab1"], ["AB1", "ab"]),
    "pattern anywhere": Case(text(pattern="cat"), ["a cat b", "cat"], ["dog"]),
    "date": Case(text(format="date"), ["2024-02-29"], ["2024-13-01", "x"]),
    "time": Case(text(format="time"), ["10:00:00Z"], ["25:00:00Z"]),
    "date-time": Case(text(format="date-time"), ["2024-01-01T10:00:00Z"], ["2024-01-01"]),
    "email": Case(text(format="email"), ["a@b.org"], ["ab"]),
    "uuid": Case(text(format="uuid"), ["123e4567-e89b-12d3-a456-426614174000"], ["x"]),
    "ipv4": Case(text(format="ipv4"), ["1.2.3.4"], ["1.2.3.400"]),
    "ipv6": Case(text(format="ipv6"), ["::1"], ["z"]),
    "uri": Case(text(format="uri"), ["http://a.b/c"], ["::"]),
    "hostname": Case(text(format="hostname"), ["a.b"], ["-a-."]),
    "duration": Case(text(format="duration"), ["P1D", "PT2H"], ["1 day"]),
    "format that only tells": Case(text(format="password"), ["x"], [1]),
    "items": Case(items(WHOLE), [[1, 2], []], [["a"]]),
    "minItems": Case(items(WHOLE, minItems=2, maxItems=3), [[1, 2], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
    "prefixItems": Case({"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 2}, [["a", 1]], [[1, "a"], ["a", 1, 2]]),
    "additionalProperties": Case({"type": "object", "additionalProperties": WHOLE}, [{"z": 1}, {}], [{"z": "a"}]),
    "patternProperties": Case({"type": "object", "patternProperties": {"^a": WHOLE}, "additionalProperties": False}, [{"ab": 1}], [{"b": 1}]),
    "minProperties": Case({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "anyOf": Case({"anyOf": [TEXT, WHOLE]}, ["a", 1], [None]),
    "oneOf": Case({"oneOf": [TEXT, WHOLE]}, ["a", 1], [None]),
    "allOf": Case({"allOf": [{"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}, {"type": "object", "properties": {"b": WHOLE}, "required": ["b"]}]}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
    "$ref": Case({"$ref": "#/$defs/a", "$defs": {"a": closed({"n": WHOLE})}}, [{"n": 1}], [{"n": "x"}]),
    "definitions": Case({"$ref": "#/definitions/a", "definitions": {"a": WHOLE}}, [1], ["x"]),
    "recursive": Case({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{"value": 1, "children": [{"value": 2, "children": []}]}], [{"value": 1, "children": [{"value": "x", "children": []}]}]),
    "$anchor": Case({"$id": "http://x/y", "$defs": {"a": {"$anchor": "q", "type": "integer"}}, "$ref": "#q"}, [1], ["a"]),
    "forbidden property": Case(closed({"a": WHOLE, "b": False}, ["a"]), [{"a": 1}], [{"a": 1, "b": 1}]),
    "deep": Case(closed({"a": closed({"b": closed({"c": closed({"d": WHOLE})})})}), [{"a": {"b": {"c": {"d": 1}}}}], [{"a": {"b": {"c": {}}}}]),
    "escapes": Case(closed({'a"b': TEXT}), [{'a"b': "\n\té😀 \\ /"}], [{"a": "x"}]),
    "key in Unicode": Case(closed({"größe": WHOLE}), [{"größe": 1}], [{"grosse": 1}]),
    "nullable": Case(text(nullable=True), ["a"], [1]),
    "null by default": Case(closed({"a": {"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "A"}}, []), [{}, {"a": None}, {"a": "x"}], [{"a": 1}]),
    "annotations": Case({"type": "integer", "title": "n", "default": 1, "examples": [2], "description": "d", "$comment": "c", "deprecated": True}, [3], ["a"]),
    "property named as a keyword": Case(closed({"format": text(format="date"), "enum": WHOLE, "const": TEXT}), [{"format": "2024-02-29", "enum": 1, "const": "int64"}], [{"format": "x", "enum": 1, "const": "a"}]),
    "large enum": Case({"enum": [f"v{i}" for i in range(500)]}, ["v499"], ["v500"]),
    "forty properties": Case(closed({f"p{i}": WHOLE for i in range(40)}), [{f"p{i}": i for i in range(40)}], [{"p0": 1}]),
    "contentEncoding": Case(text(contentEncoding="base64"), ["YQ=="], [1]),
    "calls": Case(CALLS, [{"name": "g", "arguments": {"s": "a"}}], [{"name": "g", "arguments": {"x": 1}}]),
    "read_file": Case(READ_FILE, [{"path": "/a", "limit": 20}, {"path": "/a"}], [{"limit": 20}, {"path": "/a", "limit": 0}]),
    "edit": Case(EDIT, [{"path": "a", "edits": [{"old": "x", "new": ""}]}], [{"path": "a", "edits": []}]),
    "search": Case(SEARCH, [{"query": "x", "domains": ["a.org"], "kind": "news"}], [{"query": ""}, {"query": "x", "kind": "blog"}]),
    "weather": Case(WEATHER, [{"city": "Bonn", "unit": None}, {"city": "Bonn"}], [{"city": "Bonn", "unit": "K"}]),
    "event": Case(EVENT, [{"title": "t", "at": "2024-01-01T10:00:00Z", "who": [{"name": "A", "mail": "a@b.org"}]}], [{"title": "t", "at": "soon", "who": []}]),
    "shapes": Case(SHAPES, [{"kind": "box", "width": 1, "height": 2}], [{"kind": "circle", "width": 1, "height": 2}, {"kind": "circle", "radius": 0}]),
    "sql": Case(SQL, [{"statement": "SELECT 1", "rows": 5}], [{"statement": "DROP TABLE x", "rows": 5}]),
    "points": Case(POINTS, [{"points": [[1.5, 2], [0, 0]]}], [{"points": [[1]]}, {"points": [[1, 2, 3]]}]),
}  # fmt: skip

# What a schema must not do, with the path that the error names.
REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": TEXT}, "not at #/not"),
    "if": (closed({"k": TEXT}) | {"if": {"properties": {"k": {"const": "x"}}}, "then": {}}, "if at #/if"),
    "uniqueItems": (closed({"a": items(WHOLE, uniqueItems=True)}), "uniqueItems at #/properties/a/uniqueItems"),
    "contains": ({"type": "array", "contains": WHOLE}, "contains at #/contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, "propertyNames at #/propertyNames"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired at #/dependentRequired"),
    "oneOf that overlaps": ({"oneOf": [{"type": "number"}, WHOLE]}, "oneOf at #/oneOf"),
    "unknown format": ({"$defs": {"c": text(format="color")}, "$ref": "#/$defs/c"}, "format at #/$defs/c/format"),
    "unknown type": ({"type": "text"}, "type at #/type"),
    "look-ahead": (text(pattern="(?=a)b"), "pattern at #/pattern"),
    "remote $ref": ({"$ref": "http://example.org/a"}, "$ref at #/$ref"),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum at #/minimum"),
    "lenient": ({"x-guidance": {"lenient": True}, "not": TEXT}, "not at #/not"),
    "lenient oneOf": ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "number"}, WHOLE]}, "oneOf at #/oneOf"),
    "endless $ref": ({"$ref": "#"}, "no text satisfies it"),
    "false": (False, "false"),
}  # fmt: skip

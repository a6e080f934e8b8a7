"""The fields of requests that ask for an answer of a given form, in OpenAI's, vLLM's and TGI's terms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic.config import JsonDict

from api.http.errors import ApiError, shown

MOST_CHOICES = 1024
ANY_OBJECT = {"type": "object"}
TEXT: JsonDict = {"type": "string", "minLength": 1}
SCHEMA: JsonDict = {"anyOf": [{"type": "object"}, TEXT]}


class Form(NamedTuple):
    """The form of an answer: a JSON schema, a list of texts, a regular expression, or a grammar of Lark or GBNF.

    A Lark grammar may name other forms, its `parts`, as `@name`. The schemas of `loose` ones may lose keywords.
    """

    kind: Literal["json", "choice", "regex", "lark"]
    source: Any
    parts: Mapping[str, tuple[str, Any]] = {}
    loose: Sequence[str] = ()


def schema_form(value: Any) -> Form:
    """Return the form of a JSON schema, which may be JSON in a string. Raises ValueError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"must have a JSON schema, not the text {shown(value)}") from None
    if not isinstance(value, dict | bool):
        raise ValueError(f"must have a JSON schema, which is an object, not {shown(value)}")
    return Form("json", value)


def choice_form(value: Any) -> Form:
    """Return the form of a list of texts. Raises ValueError for anything else."""
    if not isinstance(value, list) or not 0 < len(value) <= MOST_CHOICES:
        raise ValueError(f"must have a list of 1 to {MOST_CHOICES:,} choices")
    if not all(isinstance(text, str) and text for text in value):
        raise ValueError("must have only non-empty strings as choices")
    return Form("choice", value)


def text_form(kind: Literal["regex", "lark"]) -> Callable[[Any], Form]:
    """Return what reads a regular expression or a grammar; it raises ValueError for anything else."""

    def read(value: Any) -> Form:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must have a non-empty string, not {shown(value)}")
        return Form(kind, value)

    return read


def _object_form(value: Any) -> Form | None:
    if value is not True:
        raise ValueError(f"must have true, not {shown(value)}")
    return Form("json", ANY_OBJECT)


READERS: dict[str, Callable[[Any], Form | None]] = {
    "json": schema_form, "regex": text_form("regex"), "choice": choice_form, "grammar": text_form("lark"),
    "json_object": _object_form,
}  # fmt: skip


def openai_form(value: Any) -> Form | None:
    """Return the form of OpenAI's response_format, or of TGI's with a `value`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and not any(inner for name, inner in value.items() if name != "type"):
        return None
    # With a schema as in llama.cpp, or as Hugging Face's client sends it; one in `json_schema` is a mistake.
    if kind == "json_object" and value.get("json_schema") is None:
        schemas = [value[name] for name in ("schema", "value") if value.get(name) is not None]
        return schema_form(schemas[0] if schemas else ANY_OBJECT)
    if kind in ("json", "regex") or (kind == "json_schema" and "value" in value):
        return tgi_form(value)
    inner = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise ValueError('must have the type text, json_object, or json_schema with a "json_schema": {"schema": {...}}')
    return schema_form(inner["schema"])


def tgi_form(value: Any) -> Form:
    """Return the form of TGI's grammar. Raises ValueError for another value."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("json", "json_schema", "regex") or value.get("value") is None:
        raise ValueError('must have the type json, json_schema or regex, and a "value"')
    inner = value["value"]
    if kind == "regex":
        return text_form("regex")(inner)
    is_named = kind == "json_schema" and isinstance(inner, dict) and isinstance(inner.get("schema"), dict)
    return schema_form(inner["schema"] if is_named else inner)


def _structured(value: Any) -> Form | None:
    """Return the form of vLLM's structured_outputs."""
    given = {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else {}
    forms = [name for name in given if name in READERS]
    if len(forms) != 1:
        raise ValueError(f"must have exactly one of {', '.join(READERS)}, not {len(forms)}")
    for name, inner in given.items():
        if name not in READERS and inner is not False and name != "disable_any_whitespace":
            raise ValueError(f"must not have {shown(name)}, which is not supported")
    return READERS[forms[0]](given[forms[0]])


ResponseFormat = Annotated[Form | None, BeforeValidator(openai_form), WithJsonSchema({"type": "object"})]
Structured = Annotated[Form | None, BeforeValidator(_structured), WithJsonSchema({"type": "object"})]
Schema = Annotated[Form | None, BeforeValidator(schema_form), WithJsonSchema(SCHEMA)]
Regex = Annotated[Form | None, BeforeValidator(text_form("regex")), WithJsonSchema(TEXT)]
Choice = Annotated[
    Form | None, BeforeValidator(choice_form), WithJsonSchema({"type": "array", "items": TEXT, "minItems": 1})
]
Grammar = Annotated[Form | None, BeforeValidator(text_form("lark")), WithJsonSchema(TEXT)]
TgiGrammar = Annotated[Form | None, BeforeValidator(tgi_form), WithJsonSchema({"type": "object"})]


class Formed(BaseModel):
    """The fields of completions and chats that ask for a form: OpenAI's, vLLM's, and vLLM's older ones."""

    response_format: ResponseFormat = Field(
        None,
        description='an object such as {"type": "json_schema", "json_schema": {"name": "person", "schema": {...}}}, '
        '{"type": "json_object"} or {"type": "text"}',
    )
    structured_outputs: Structured = Field(
        None, description="an object with one of json (a schema), regex, choice, grammar (Lark or GBNF) and json_object"
    )
    guided_json: Schema = Field(None, description="a JSON schema")
    guided_regex: Regex = Field(None, description="a regular expression")
    guided_choice: Choice = Field(None, description="a list of texts")
    guided_grammar: Grammar = Field(None, description="a grammar, of Lark or GBNF")

    @property
    def form(self) -> tuple[str, Form] | None:
        """The form, and the name of the field that asks for it. Raises ApiError where two fields ask for one."""
        given = [(name, getattr(self, name)) for name in Formed.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            names = [name for name, _ in given]
            raise ApiError(f"{' and '.join(names)} both ask for a form. Send only one of them", param=names[0])
        return given[0] if given else None

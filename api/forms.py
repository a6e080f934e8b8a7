"""Stub."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from api.service import Engine


class Form(NamedTuple):
    kind: Literal["json", "json_object", "choice", "regex", "lark"]
    source: Any


def constrain(engine: Engine, form: Form, param: str) -> Any:
    return form


def json_source(schema: Any) -> str:
    return json.dumps(
        {**schema, "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    )

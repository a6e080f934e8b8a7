"""The schemas of requests to /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr
from pydantic.json_schema import SkipJsonSchema

from api.schemas import fields as f
from api.schemas.openai import MESSAGES, Messages


def _has(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": "string"}}}


class TokenizeRequest(BaseModel):
    """A text to tokenize: vLLM's form has `prompt` or `messages`, TGI's has `inputs`."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"anyOf": [_has("prompt"), _has("inputs")]})

    model: f.Name | None = Field(None, description=f.MODEL)
    prompt: StrictStr | None = Field(None, description="a string")
    inputs: StrictStr | None = Field(None, description="a string")
    # Left out of the schema, where it would make the other two optional.
    messages: SkipJsonSchema[Messages | None] = Field(None, description=MESSAGES)
    add_generation_prompt: f.Flag = Field(True, description=f.FLAG)
    add_special_tokens: f.Flag = Field(True, description=f.FLAG)


class DetokenizeRequest(BaseModel):
    """Token ids to convert to text."""

    model_config = ConfigDict(extra="ignore")

    model: f.Name | None = Field(None, description=f.MODEL)
    tokens: f.Ids = Field(description="a list of token ids")

"""The schemas of requests to /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.openai import MESSAGES, Messages


def _has(name: str, kind: str = "string") -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeRequest(u.Refusing):
    """A text to tokenize: vLLM's form has `prompt` or `messages`, TGI's has `inputs`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_has("prompt"), _has("messages", "array"), _has("inputs")]})
    unsupported: ClassVar = u.TOKENIZE

    model: f.Name | None = Field(None, description=f.MODEL)
    prompt: StrictStr | None = Field(None, description="a string")
    messages: Messages | None = Field(None, description=MESSAGES)
    inputs: StrictStr | None = Field(None, description="a string")
    add_generation_prompt: f.Flag = Field(True, description=f.FLAG)
    add_special_tokens: f.Flag = Field(True, description=f.FLAG)


class DetokenizeRequest(BaseModel):
    """Token ids to convert to text."""

    model: f.Name | None = Field(None, description=f.MODEL)
    tokens: f.Ids = Field(description="a list of token ids")

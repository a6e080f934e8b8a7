"""The schemas of requests in Ollama's dialect."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictStr, WithJsonSchema, WrapValidator
from pydantic.json_schema import SkipJsonSchema

from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.openai import MESSAGES, MOST_MESSAGES, TOOLS, UNLIMITED, EmbeddingRequest, Message, Tools, one_of_these
from api.schemas.scheduling_hints import SchedulingHints

FORMAT = '"json" or a JSON schema'


def _format(value: Any) -> Any:
    """Return the `response_format` that means the same."""
    if value in ("", "json"):
        return {"type": "json_object" if value else "text"}
    if not isinstance(value, dict):
        raise ValueError(f"must be {FORMAT}")
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _limit(tokens: int) -> int:
    return tokens if tokens > 0 else UNLIMITED


class Options(u.Refusing):
    """The model's options, with their names in chat and Ollama's defaults."""

    unsupported: ClassVar = u.EVERYWHERE

    num_predict: Annotated[int, Field(strict=True, ge=-2, lt=1 << 31), f.INTEGER, AfterValidator(_limit)] = Field(
        UNLIMITED, serialization_alias="max_tokens",
        description="a whole number of tokens to generate, or 0, -1 or -2 for all that the context leaves",
    )  # fmt: skip
    temperature: f.Temperature = Field(0.8, description=f.TEMPERATURE)
    top_k: f.TopK = Field(40, description=f.TOP_K)
    top_p: f.TopP = Field(0.9, description=f.TOP_P)
    min_p: f.MinP = Field(0.0, description="a number from 0 to 1")
    seed: Annotated[f.Int64, AfterValidator(lambda seed: seed if seed >= 0 else None)] = Field(
        -1, validate_default=True, description=f"{f.SEED}; in place of a negative one, one is drawn"
    )
    stop: f.Stops = Field([], description=f.STOP)
    repeat_penalty: f.Above0 = Field(1.0, serialization_alias="repetition_penalty", description="a number above 0")
    presence_penalty: f.Penalty = Field(0.0, description=f.PENALTY)
    frequency_penalty: f.Penalty = Field(0.0, description=f.PENALTY)


class OllamaRequest(SchedulingHints):
    """The fields that chats and completions share."""

    unsupported: ClassVar = u.OLLAMA
    prompted_by: ClassVar[str]  # the field without which it asks only whether the model is loaded

    model: f.Name | None = Field(None, description=f"{f.MODEL}; NAME:latest is NAME")
    stream: f.Flag = Field(True, description=f.FLAG)
    format: Annotated[
        Any, BeforeValidator(_format), WithJsonSchema({"anyOf": [{"type": "object"}, {"enum": ["", "json"]}]})
    ] = Field(None, serialization_alias="response_format", description=FORMAT)
    options: Options = Field(Options(), description='an object such as {"temperature": 0, "num_predict": 40}')
    think: Annotated[f.Flag | Literal["low", "medium", "high", "max"] | None, WrapValidator(one_of_these)] = Field(
        None, description='true, false, "low", "medium", "high" or "max"'
    )


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    prompted_by: ClassVar = "messages"

    messages: Annotated[list[Message], Field(fail_fast=True), f.at_most(MOST_MESSAGES)] = Field(
        [], description=MESSAGES
    )
    tools: SkipJsonSchema[Tools] = Field([], description=TOOLS)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompted_by: ClassVar = "prompt"

    prompt: StrictStr = Field("", description="a string")
    system: StrictStr = Field("", description="a string, without raw: true")
    raw: f.Flag = Field(
        False, description=f"{f.FLAG}; with true, the prompt goes to the model without its chat template"
    )


class OllamaEmbedRequest(EmbeddingRequest):
    """POST /api/embed."""

    unsupported: ClassVar = {**u.EMBEDDINGS, "truncate": (False, True)}


class ShowRequest(BaseModel):
    """POST /api/show. `name` is the older name of `model`."""

    model: f.Name | None = Field(None, description=f.MODEL)
    name: f.Name | None = Field(None, description=f.MODEL)

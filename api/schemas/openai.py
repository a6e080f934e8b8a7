"""The schemas of requests in OpenAI's dialect, with vLLM's extra fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
)
from pydantic.config import JsonDict
from pydantic.json_schema import SkipJsonSchema

from api.http.errors import shown
from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.forms import Formed
from api.schemas.scheduling_hints import SchedulingHints

MOST_MESSAGES = 4096
MOST_TOOLS = 128
TEMPLATE_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # of a message, beside role and content
UNLIMITED = -1  # as max_tokens: all tokens that the context leaves


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1")
    return value


Limit = Annotated[
    int,
    Field(strict=True, ge=UNLIMITED, json_schema_extra={"not": {"const": 0}, "x-below": "context"}),
    f.INTEGER,
    AfterValidator(_not_zero),
]
PROMPTS = "a non-empty string, a list of at most 64 strings, a list of token ids, or a list of at most 64 such lists"
MOST_TOKENS = f"{UNLIMITED} for all that the context leaves"


class StreamOptions(BaseModel):
    """Usage reports of a stream."""

    include_usage: f.Flag = Field(False, description=f.FLAG)
    continuous_usage_stats: f.Flag = Field(False, description=f.FLAG)


class Sampled(Formed, SchedulingHints):
    """The fields that completions and chat share."""

    model: f.Name | None = Field(None, description=f.MODEL)
    temperature: f.Temperature = Field(1.0, description=f.TEMPERATURE)
    top_p: f.TopP = Field(1.0, description=f.TOP_P)
    n: Annotated[int, Field(strict=True, ge=1, le=16), f.INTEGER] = Field(1, description="a whole number from 1 to 16")
    stream: f.Flag = Field(False, description=f.FLAG)
    stream_options: StreamOptions | None = Field(
        None,
        description='an object such as {"include_usage": true}; with "continuous_usage_stats": true too, each chunk '
        "reports how many tokens its choice has so far",
    )
    stop: f.Stops = Field([], description=f.STOP)
    presence_penalty: f.Penalty = Field(0.0, description=f.PENALTY)
    frequency_penalty: f.Penalty = Field(0.0, description=f.PENALTY)
    logit_bias: f.Biases = Field({}, description='an object such as {"50256": -100}, with at most 300 ids')
    seed: f.Int64 | None = Field(None, description=f.SEED)
    top_k: f.TopK = Field(0, description=f.TOP_K)
    min_p: f.MinP = Field(0.0, description="a number from 0 to 1")
    repetition_penalty: f.Above0 = Field(1.0, description="a number above 0")
    ignore_eos: f.Flag = Field(False, description=f.FLAG)
    min_tokens: SkipJsonSchema[Annotated[int, Field(strict=True, ge=0), f.INTEGER]] = Field(
        0, description="a whole number from 0 to max_tokens"
    )
    stop_token_ids: Annotated[list[f.Token], Field(fail_fast=True, max_length=64), f.at_most(64)] = Field(
        [], description="a list of at most 64 token ids"
    )
    include_stop_str_in_output: f.Flag = Field(False, description=f.FLAG)
    skip_special_tokens: f.Flag = Field(True, description=f.FLAG)
    request_id: f.RequestId | None = Field(None, description="1 to 128 characters: letters, digits and . _ : -")
    truncate_prompt_tokens: f.Count | None = Field(None, description=f.KEPT_TOKENS)
    return_token_ids: f.Flag = Field(False, description=f.FLAG)
    stream_interval: Annotated[int, Field(strict=True, ge=1, le=1024), f.INTEGER] | None = Field(
        None, description="a whole number of tokens per chunk, 1 to 1024; by default a chunk has the tokens of 20 ms"
    )
    timeout_s: f.Seconds | None = Field(None, description=f.SECONDS)

    def ignored(self, read: Collection[str] | None) -> list[str]:
        """Return the fields with a value, within others, that have no effect.

        `read` are the variables that the model's chat template reads, None for a model without one.
        """
        return []


class CompletionRequest(Sampled):
    """POST /v1/completions. `min_tokens` ranges from 0 to max_tokens."""

    unsupported: ClassVar = u.EVERYWHERE

    prompt: f.Prompts = Field(description=PROMPTS)
    max_tokens: Annotated[int, Field(strict=True, ge=UNLIMITED), f.INTEGER] = Field(
        16, description=f"a whole number of tokens to generate, or {MOST_TOKENS}",
        json_schema_extra={"x-below": "context"},
    )  # fmt: skip
    logprobs: f.Scores | None = Field(None, description="a whole number from 0 to 5")
    prompt_logprobs: f.Scores | None = Field(None, description="a whole number from 0 to 5")
    echo: f.Flag = Field(False, description=f.FLAG)


class EmbeddingRequest(SchedulingHints):
    """POST /v1/embeddings."""

    unsupported: ClassVar = u.EMBEDDINGS

    model: f.Name | None = Field(None, description=f.MODEL)
    input: f.Prompts = Field(description=PROMPTS)
    encoding_format: Literal["float", "base64"] = Field("float", description='"float" or "base64"')
    dimensions: SkipJsonSchema[f.Count | None] = Field(None, description="the width of the model, or leave it out")
    pooling: Literal["mean", "last"] = Field("mean", description='"mean" or "last"')
    truncate_prompt_tokens: f.Count | None = Field(None, description=f.KEPT_TOKENS)


def _content(value: Any) -> Any:
    """Return the text of a message, which is a string or a list of text parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise ValueError('must have only parts such as {"type": "text", "text": "..."}')
        texts.append(text)
    return "".join(texts)


CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


# Only a message of the assistant may have no content, as it does after a tool call.
SILENT_ASSISTANT: JsonDict = {
    "if": {"properties": {"content": {"type": "null"}}},
    "then": {"required": ["role"], "properties": {"role": {"const": "assistant"}}},
}


def of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Check that a schema is that of an object."""
    if schema.get("type", "object") != "object":
        raise ValueError('must be the schema of an object, with "type": "object"')
    return schema


def distinct(tools: list[Any]) -> list[Any]:
    """Check that tools have different names, which are theirs or those of their functions."""
    names = [getattr(tool, "function", tool).name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"must have each name once, not {shown(twice)} twice")
    return tools


def one_of_these(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:  # which would list what each form lacks
        raise ValueError("must be one of these") from None


def _without_default(schema: JsonDict) -> None:
    del schema["default"]


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow", json_schema_extra=SILENT_ASSISTANT)

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="system, developer, user, assistant or tool"
    )
    content: Annotated[StrictStr | None, BeforeValidator(_content), WithJsonSchema(CONTENT_SCHEMA)] = Field(
        default=None,
        validate_default=True,
        json_schema_extra=_without_default,
        description="a string, or a list of text parts; null only for the assistant",
    )

    @field_validator("content")
    @classmethod
    def _has_content(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") != "assistant":
            raise ValueError("must be a string or a list of text parts")
        return value


# The document does not state the bound as maxItems: most contexts and bodies end long before it, which a schema cannot say.
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1), f.at_most(MOST_MESSAGES)]
MESSAGES = (
    f'a list of 1 to {MOST_MESSAGES:,} messages, such as [{{"role": "user", "content": "..."}}], the last ones of a longer '
    "conversation"
)


class Function(BaseModel):
    """A function that the model may call."""

    name: f.FunctionName = Field(description=f.FUNCTION_NAME)
    description: StrictStr | None = Field(None, description="a string")
    parameters: Annotated[dict[str, Any], AfterValidator(of_object)] | None = Field(
        None, description="the JSON schema of an object, or leave it out for a function without parameters"
    )
    strict: f.Flag | None = Field(None, description=f.FLAG)  # arguments always keep to the schema


class Tool(BaseModel):
    """A tool of a request."""

    type: Literal["function"] = Field(description='"function"')
    function: Function = Field(description='an object such as {"name": "f", "parameters": {...}}')


class NamedChoice(BaseModel):
    """A tool choice that names a function."""

    type: Literal["function"]
    function: Function


FUNCTIONS = BeforeValidator(f.without("tools", lambda kind: kind != "function"))  # a server would run the others itself
Tools = Annotated[list[Tool], FUNCTIONS, f.at_most(MOST_TOOLS), AfterValidator(distinct)]
TOOLS = (
    f'a list of at most {MOST_TOOLS} tools, such as {{"type": "function", "function": {{"name": "f", "parameters": {{...}}}}}}, '
    "each with a name of its own"
)
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice | None, WrapValidator(one_of_these)]
TOOL_CHOICE = '"none", "auto", "required", or {"type": "function", "function": {"name": "f"}}, with tools'


class ChatRequest(Sampled):
    """POST /v1/chat/completions. `max_completion_tokens` is another name of max_tokens; `min_tokens` is at most max_tokens.

    `tools`, `tool_choice` and `continue_final_message` are as in OpenAI's and vLLM's API.
    """

    unsupported: ClassVar = u.CHAT

    messages: Messages = Field(description=MESSAGES)
    max_tokens: Limit | None = Field(
        None,
        description=f"a whole number of tokens to generate, at least 1, or (the default) {MOST_TOKENS}",
        examples=[8],
        json_schema_extra=_without_default,
    )
    max_completion_tokens: SkipJsonSchema[Limit | None] = Field(
        None, description=f"a whole number of tokens to generate, at least 1, or {MOST_TOKENS}"
    )
    logprobs: f.Flag | None = Field(None, description=f.FLAG)
    top_logprobs: SkipJsonSchema[Annotated[int, Field(strict=True, ge=0, le=20), f.INTEGER] | None] = Field(
        None, description="a whole number from 0 to 20, with logprobs: true"
    )
    tools: SkipJsonSchema[Tools] = Field([], description=TOOLS)
    tool_choice: SkipJsonSchema[ToolChoice] = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: f.Flag = Field(True, description=f.FLAG)
    chat_template_kwargs: dict[str, Any] = Field({}, description='an object such as {"enable_thinking": false}')
    reasoning_effort: StrictStr | None = Field(None, description='a string such as "low", or "none"')
    add_generation_prompt: f.Flag = Field(True, description=f.FLAG)
    continue_final_message: SkipJsonSchema[f.Flag] = Field(
        False, description="true, with add_generation_prompt: false and a last message of the assistant, or false"
    )

    def ignored(self, read: Collection[str] | None) -> list[str]:
        variables = set(read or ()) - {"tools"}  # which only the field of this name sets
        unread = [f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs if name not in variables]
        if self.reasoning_effort not in (None, "none") and "reasoning_effort" not in variables:
            unread.append("reasoning_effort")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            unread.append("max_tokens")
        known = (*u.MESSAGE, "tool_calls", "tool_call_id", *(() if read is None else TEMPLATE_FIELDS))
        return unread + [
            f"messages.{i}.{name}"
            for i, message in enumerate(self.messages)
            for name, value in (message.model_extra or {}).items()
            if value not in (None, [], {}) and name not in known
        ]

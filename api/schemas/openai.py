"""What requests in OpenAI's dialect may say, vLLM's extras among it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.json_schema import SkipJsonSchema

from api.schemas import fields as f
from api.schemas.scheduling_hints import SchedulingHints

MOST_MESSAGES = 64
UNLIMITED = -1  # as max_tokens: all the room that the context leaves


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1")
    return value


Limit = Annotated[f.integer(ge=UNLIMITED), AfterValidator(_not_zero), Field(json_schema_extra={"not": {"const": 0}})]
ALL_THE_ROOM = f"{UNLIMITED} for all that the context leaves"


class StreamOptions(BaseModel):
    """Usage reports of a stream."""

    include_usage: f.Flag = Field(False, description=f.FLAG)
    continuous_usage_stats: f.Flag = Field(False, description=f.FLAG)


# What one schema cannot say of two fields without naming every pair is left out of it, and told in words.
NEEDS_STREAM = {
    "anyOf": [
        {"required": ["stream"], "properties": {"stream": {"const": True}}},
        {"properties": {"stream_options": {"type": "null"}}},
    ]
}
ZERO_NEEDS_ECHO = {
    "anyOf": [
        {"required": ["echo"], "properties": {"echo": {"const": True}}},
        {"properties": {"max_tokens": {"not": {"const": 0}}}},
    ]
}


class Sampled(SchedulingHints):
    """The fields that completions and chat share."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=NEEDS_STREAM)

    model: f.Name | None = Field(None, description="the name of the served model, or leave it out")
    temperature: f.Temperature = Field(1.0, description=f.TEMPERATURE)
    top_p: f.TopP = Field(1.0, description=f.TOP_P)
    n: f.integer(ge=1, le=16) = Field(1, description="a whole number from 1 to 16")
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
    min_tokens: SkipJsonSchema[f.integer(ge=0)] = Field(0, description="a whole number from 0 to max_tokens")
    stop_token_ids: f.several(f.Token, 64) = Field([], description="a list of at most 64 token ids")
    include_stop_str_in_output: f.Flag = Field(False, description=f.FLAG)
    skip_special_tokens: f.Flag = Field(True, description=f.FLAG)
    request_id: f.RequestId | None = Field(None, description="1 to 128 characters: letters, digits and . _ : -")
    truncate_prompt_tokens: f.integer(ge=1, lt=1 << 31) | None = Field(
        None, description="a whole number of tokens to keep, at least 1"
    )
    return_token_ids: f.Flag = Field(False, description=f.FLAG)
    stream_interval: f.integer(ge=1, le=1024) | None = Field(
        None, description="a whole number of tokens per chunk, 1 to 1024; by default a chunk has the tokens of 20 ms"
    )
    timeout_s: f.Seconds | None = Field(None, description=f.SECONDS)

    def unread(self) -> list[str]:
        """Return the fields of objects in lists that say something and that nobody reads."""
        return []


class CompletionRequest(Sampled):
    """POST /v1/completions. `best_of` ranges from n to 20, and `min_tokens` from 0 to max_tokens."""

    model_config = ConfigDict(json_schema_extra={"allOf": [NEEDS_STREAM, ZERO_NEEDS_ECHO]})

    prompt: f.Prompts = Field(
        description="a non-empty string, a list of at most 64 strings, a list of token ids, or a list of at most 64 such lists"
    )
    max_tokens: f.integer(ge=UNLIMITED) = Field(
        16, description=f"a whole number of tokens to generate, at least 1 (0 with echo), or {ALL_THE_ROOM}"
    )
    best_of: SkipJsonSchema[f.integer(ge=1, le=20) | None] = Field(None, description="a whole number from n to 20")
    logprobs: f.integer(ge=0, le=5) | None = Field(None, description="a whole number from 0 to 5")
    prompt_logprobs: f.integer(ge=0, le=5) | None = Field(None, description="a whole number from 0 to 5")
    echo: f.Flag = Field(False, description=f.FLAG)


def _content(value: Any) -> Any:
    """Return the text of a message: a string, or the parts of one."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or len(value) > MOST_MESSAGES:
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
            "maxItems": MOST_MESSAGES,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


# Only the assistant may have said nothing, as it does where it called a tool.
SILENT_ASSISTANT = {
    "anyOf": [
        {"required": ["role"], "properties": {"role": {"const": "assistant"}}},
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
    ]
}


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow", json_schema_extra=SILENT_ASSISTANT)

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="system, developer, user or assistant"
    )
    content: Annotated[StrictStr | None, BeforeValidator(_content), WithJsonSchema(CONTENT_SCHEMA)] = Field(
        None,
        validate_default=True,
        json_schema_extra=lambda schema: schema.pop("default"),
        description="a string, or a list of text parts; null only for the assistant",
    )

    @field_validator("content")
    @classmethod
    def _is_said(cls, value: str | None, info: ValidationInfo) -> str:
        if value is None and info.data.get("role") != "assistant":
            raise ValueError("must be a string or a list of text parts")
        return value or ""


class ChatRequest(Sampled):
    """POST /v1/chat/completions. `max_completion_tokens` is another name of max_tokens; `min_tokens` is at most max_tokens."""

    messages: f.several(Message, MOST_MESSAGES, least=1) = Field(
        description='a list such as [{"role": "user", "content": "..."}]'
    )
    max_tokens: Limit | None = Field(
        None,
        description=f"a whole number of tokens to generate, at least 1, or (the default) {ALL_THE_ROOM}",
        examples=[8],
        json_schema_extra=lambda schema: schema.pop("default"),
    )
    max_completion_tokens: SkipJsonSchema[Limit | None] = Field(
        None, description=f"a whole number of tokens to generate, at least 1, or {ALL_THE_ROOM}"
    )

    def unread(self) -> list[str]:
        return [
            f"messages.{i}.{name}"
            for i, message in enumerate(self.messages)
            for name, value in (message.model_extra or {}).items()
            if value not in (None, [], {})
        ]


# Known fields that would change the output and are not supported, each with the values that change nothing.
_OFF = (False, [], {}, "", 0)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": _OFF, "length_penalty": (1, 1.0), "early_stopping": _OFF, "logits_processors": _OFF,
    "bad_words": _OFF, "allowed_token_ids": (), "prompt_embeds": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "response_format": ({"type": "text"},), "typical_p": (1, 1.0), "watermark": _OFF, "logits_bias_type": (),
    "continue_final_message": _OFF, "kv_transfer_params": ({},), "thinking_token_budget": (), "repetition_detection": (),
}  # fmt: skip
UNSUPPORTED_COMPLETION = UNSUPPORTED | {"suffix": ("",)}
UNSUPPORTED_CHAT = UNSUPPORTED | {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "logprobs": (False,), "top_logprobs": (0,), "chat_template": (), "chat_template_kwargs": ({},),
    "documents": ([],), "echo": (False,), "modalities": (["text"],), "audio": (), "prediction": (), "best_of": (1,),
    "reasoning_effort": ("none",), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
    "include_reasoning": (True, False), "add_generation_prompt": (True,), "prompt_logprobs": (),
}  # fmt: skip

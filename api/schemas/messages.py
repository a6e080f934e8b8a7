"""The schemas of requests in Anthropic's dialect: messages of blocks, tools, and the form of an answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictStr, ValidationInfo, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from api.http.errors import shown
from api.schemas import fields as f
from api.schemas import unsupported as u
from api.schemas.forms import Form, schema_form
from api.schemas.openai import CONTENT_SCHEMA, MOST_MESSAGES, MOST_TOOLS, distinct, of_object
from api.schemas.scheduling_hints import SchedulingHints

Block = dict[str, Any]
# The fields that a block of each kind must have, in the words of JSON Schema, and who may say it.
BLOCKS = {
    "text": {"text": "string"}, "tool_result": {"tool_use_id": "string"}, "thinking": {"thinking": "string"},
    "tool_use": {"id": "string", "name": "string", "input": "object"}, "tool_reference": {"tool_name": "string"},
}  # fmt: skip
RESULTS = ("text", "tool_reference")  # what a tool_result may have; an image is left out
OF_RESULT = f.without("tool_result", lambda kind: kind not in RESULTS)
OF_ASSISTANT = f.without("messages.content", lambda kind: kind not in BLOCKS)  # a server's own, such as web_search
KINDS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
TYPES = {"string": str, "object": dict}
READ = {"type", "content", "is_error", "signature"}.union(*BLOCKS.values())  # fields of blocks; others have no effect


def blocks(value: Any, kinds: tuple[str, ...] = ("text",), info: Any = None) -> list[Block]:
    """Return the blocks of a string or of a list of blocks of these kinds; raise ValueError for anything else."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise ValueError(f"must have only blocks with the type {' or '.join(kinds)}, not {shown(kind)}")
        for name, needed in BLOCKS[kind].items():
            if not isinstance(block.get(name), TYPES[needed]):
                raise ValueError(f"must have a {name} ({needed}) in each {kind} block, not {shown(block.get(name))}")
        if kind == "tool_result":
            block["content"] = blocks(OF_RESULT(block.get("content") or "", info), RESULTS)
    return value


def _of_role(value: Any, info: ValidationInfo) -> list[Block]:
    role = info.data.get("role", "")
    return blocks(OF_ASSISTANT(value, info) if role == "assistant" else value, KINDS.get(role, ("text",)), info)


def _form(value: Any) -> Form:
    if not isinstance(value, dict) or value.get("type") != "json_schema" or "schema" not in value:
        raise ValueError('must have the type json_schema and a "schema"')
    return schema_form(value["schema"])


CUSTOM = BeforeValidator(f.without("tools", lambda kind: kind != "custom"))  # a server would run the others itself
JsonForm = SkipJsonSchema[Annotated[Form | None, BeforeValidator(_form)]]
TOOLS = f'a list of at most {MOST_TOOLS} tools such as {{"name": "f", "input_schema": {{...}}}}, each with a name of its own'
JSON_FORM = 'an object such as {"type": "json_schema", "schema": {...}}'


class Turn(BaseModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system", "developer"] = Field(description="user, assistant or system")
    content: Annotated[list[Block], BeforeValidator(_of_role), WithJsonSchema(CONTENT_SCHEMA)] = Field(
        description="a string, or a list of blocks: text and tool_result of the user, text, thinking and tool_use of the assistant"
    )


class Tool(BaseModel):
    """A function that the model may call, with `defer_loading` only once a tool's result refers to it."""

    type: Literal["custom"] = Field("custom", description='"custom"')
    name: f.FunctionName = Field(description=f.FUNCTION_NAME)
    description: StrictStr | None = Field(None, description="a string")
    input_schema: Annotated[dict[str, Any], AfterValidator(of_object)] = Field(
        description="the JSON schema of an object"
    )
    strict: f.Flag | None = Field(None, description=f.FLAG)
    defer_loading: f.Flag = Field(False, description=f.FLAG)


class ToolChoice(BaseModel):
    """Whether an answer may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        "auto", description='"auto", "any", "none", or "tool" with a name'
    )
    name: f.FunctionName | None = Field(None, description=f.FUNCTION_NAME)
    disable_parallel_tool_use: f.Flag = Field(False, description=f.FLAG)


class Thinking(BaseModel):
    """Whether an answer begins with a thinking part."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        "disabled", description='"enabled", "disabled" or "adaptive"'
    )


class OutputConfig(u.Refusing):
    """The form of an answer."""

    unsupported: ClassVar = {"type": (), "schema": (), "json_schema": ()}

    format: JsonForm = Field(None, description=JSON_FORM)


class CountRequest(u.Refusing):
    """POST /v1/messages/count_tokens: all that is in a prompt."""

    unsupported: ClassVar = u.MESSAGES

    model: f.Name | None = Field(None, description=f.MODEL)
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1), f.at_most(MOST_MESSAGES)] = Field(
        description=f'a list of 1 to {MOST_MESSAGES:,} messages, such as [{{"role": "user", "content": "..."}}]'
    )
    system: Annotated[list[Block], BeforeValidator(blocks), WithJsonSchema(CONTENT_SCHEMA)] = Field(
        "", validate_default=True, description="a string, or a list of text blocks"
    )
    tools: SkipJsonSchema[Annotated[list[Tool], CUSTOM, f.at_most(MOST_TOOLS), AfterValidator(distinct)]] = Field(
        [], description=TOOLS
    )
    tool_choice: SkipJsonSchema[ToolChoice] = Field(ToolChoice(), description='an object such as {"type": "auto"}')
    thinking: SkipJsonSchema[Thinking] = Field(Thinking(), description='an object such as {"type": "disabled"}')
    output_config: OutputConfig = Field(OutputConfig(), description=f'an object such as {{"format": {JSON_FORM[18:]}}}')
    output_format: JsonForm = Field(None, description=JSON_FORM)


class MessagesRequest(CountRequest, SchedulingHints):
    """POST /v1/messages."""

    max_tokens: f.Count = Field(description="a whole number of tokens to generate, at least 1", examples=[8])
    stop_sequences: f.StopList = Field([], description=f.STOP)
    temperature: Annotated[float, Field(allow_inf_nan=False, ge=0, le=1), f.NUMBER] = Field(
        1.0, description="a number from 0 (greedy) to 1"
    )
    top_p: f.TopP = Field(1.0, description=f.TOP_P)
    top_k: f.TopK = Field(0, description=f.TOP_K)
    seed: f.Int64 | None = Field(None, description=f.SEED)
    stream: f.Flag = Field(False, description=f.FLAG)

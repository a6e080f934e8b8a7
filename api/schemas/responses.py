"""The schema of requests of OpenAI's responses, and the chat that such a request means."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictStr, WithJsonSchema, WrapValidator
from pydantic.json_schema import SkipJsonSchema

from api.http.errors import shown
from api.schemas import fields as f
from api.schemas import openai as o
from api.schemas import unsupported as u
from api.schemas.forms import Form, openai_form

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text", "text")
LINKED = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
# A server's own calls, results and state, and what a result has beside text. A part of a message is no item.
FOR_MODEL = f.without("input", lambda kind: kind not in LINKED + PARTS + ("message", "reasoning", "input_image"))
OF_RESULT = f.without("input.output", lambda kind: kind not in PARTS)
TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {
    "type": "object", "required": ["type", "text"], "properties": {"type": {"enum": PARTS}, "text": {"type": "string"}},
}}]}  # fmt: skip
INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": [
    {"type": "object", "required": ["role", "content"],
     "properties": {"type": {"const": "message"}, "role": {"enum": ROLES}, "content": TEXTS}},
    {"type": "object", "required": ["type", "call_id", "output"],
     "properties": {"type": {"const": "function_call_output"}, "call_id": {"type": "string"}, "output": TEXTS}},
]}}]}  # fmt: skip


def _text(value: Any, item: Any) -> str:
    """Return the text of a string or of a list of text parts."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in PARTS]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must have only text, as a string or as input_text and output_text, unlike {shown(item)}")
    return "".join(map(str, texts))


def _messages(value: Any, info: Any) -> Any:
    """Return the messages of an input: a text, or a list of messages, calls and results. Reasoning is left out."""
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of items")
    messages: list[dict[str, Any]] = []
    for item in [{"role": "user", "content": value}] if isinstance(value, str) else FOR_MODEL(value, info):
        kind: Any = (item.get("type") or "message") if isinstance(item, dict) else None
        is_linked = kind in LINKED and isinstance(item.get("call_id"), str)
        if kind == "message" and item.get("role") in ROLES:
            messages.append({"role": item["role"], "content": _text(item.get("content"), item)})
        elif is_linked and "output" not in kind:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif is_linked:
            content = _text(OF_RESULT(item.get("output"), info), item)
            messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})
        elif kind != "reasoning":
            raise ValueError(f"must have only messages, calls and results, with their fields, unlike {shown(item)}")
    if not messages:
        raise ValueError("must have a message")
    return messages


def _form(value: dict[str, Any]) -> Form | None:
    """Return the form that `text.format` asks for, which has its schema beside its name."""
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema") or (kind == "json_schema" and value.get("schema") is None):
        raise ValueError('must have the type text, json_object, or json_schema with a "schema"')
    return openai_form({"type": kind, "json_schema": value} if kind == "json_schema" else value)


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    _form(value)
    return value


class FlatTool(o.Function):
    """A tool of a request, or the choice of one."""

    type: Literal["function"] = Field(description='"function"')

    @property
    def function(self) -> o.Function:
        """The function, as tools of chats have it."""
        return self


class TextOptions(BaseModel):
    """How the text of an answer is written."""

    unsupported: ClassVar = {"verbosity": ("medium",)}

    format: Annotated[dict[str, Any], AfterValidator(_checked)] = Field(
        {"type": "text"},
        description='an object such as {"type": "json_schema", "name": "person", "schema": {...}}, {"type": "json_object"} '
        'or {"type": "text"}',
    )


class Reasoning(BaseModel):
    """How the model thinks."""

    effort: StrictStr | None = Field(None, description='a string such as "low", or "none"')


class ResponsesRequest(o.Sampled):
    """POST /v1/responses. Nothing is stored: the input is the whole conversation."""

    unsupported: ClassVar = u.RESPONSES

    input: Annotated[
        list[o.Message], BeforeValidator(_messages), f.at_most(o.MOST_MESSAGES), WithJsonSchema(INPUT),
    ] = Field(
        description=f'a string, or a list of at most {o.MOST_MESSAGES:,} items such as {{"role": "user", "content": "..."}}, '
        '{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"} and {"type": "function_call_output", '
        '"call_id": "c", "output": "..."}',
    )  # fmt: skip
    instructions: StrictStr | None = Field(None, description="a string, which becomes the first message")
    max_output_tokens: o.Limit | None = Field(
        None, description=f"a whole number of tokens to generate, at least 1, or (the default) {o.MOST_TOKENS}"
    )
    tools: SkipJsonSchema[
        Annotated[list[FlatTool], o.FUNCTIONS, f.at_most(o.MOST_TOOLS), AfterValidator(o.distinct)]
    ] = Field(
        [],
        description=f'a list of at most {o.MOST_TOOLS} tools such as {{"type": "function", "name": "f", "parameters": '
        "{...}}, each with a name of its own",
    )
    tool_choice: SkipJsonSchema[
        Annotated[Literal["none", "auto", "required"] | FlatTool, WrapValidator(o.one_of_these)]
    ] = Field("auto", description='"none", "auto", "required", or {"type": "function", "name": "f"}, with tools')
    parallel_tool_calls: f.Flag = Field(True, description=f.FLAG)
    text: TextOptions = Field(TextOptions(), description='an object such as {"format": {"type": "json_object"}}')
    reasoning: Reasoning = Field(Reasoning(), description='an object such as {"effort": "low"}')
    metadata: dict[str, Any] = Field({}, description="an object, which the answer repeats")
    store: f.Flag = Field(False, description=f.FLAG)
    n: Annotated[int, Field(strict=True, ge=1, le=1), f.INTEGER] = Field(1, description="1")
    return_token_ids: f.Off = Field(False, description="false, or leave it out")
    response_format: f.Null = Field(None, description="text.format instead")
    previous_response_id: f.Null = Field(None, description="the whole conversation as input, as no response is stored")

    def chat(self) -> o.ChatRequest:
        """Return the chat that it means. All its fields have been checked."""
        first = [o.Message(role="system", content=self.instructions)] if self.instructions else []
        choice = self.tool_choice
        shared = {name: value for name, value in self if name in self.model_fields_set & o.Sampled.model_fields.keys()}
        fields = {
            "messages": first + self.input, "max_tokens": self.max_output_tokens,
            "tools": [o.Tool(type="function", function=tool) for tool in self.tools],
            "tool_choice": choice if isinstance(choice, str) else o.NamedChoice(type="function", function=choice),
            "parallel_tool_calls": self.parallel_tool_calls, "reasoning_effort": self.reasoning.effort,
            "response_format": _form(self.text.format),
        }  # fmt: skip
        return o.ChatRequest.model_construct(**shared | fields)

    def ignored(self, read: Collection[str] | None) -> list[str]:
        unread = [name.replace("reasoning_effort", "reasoning.effort") for name in self.chat().ignored(read)]
        return [*unread, "store"] if self.store else unread

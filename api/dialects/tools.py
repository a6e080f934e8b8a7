"""Tools and thinking in a chat: what the template gets, the form that an answer must have, and how it is taken apart.

All dialects with tools make a `ChatRequest` of theirs, so this module must not know other wire formats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from api.answer_parts import AnswerParts
from api.generation import Generation, constraint
from api.http.errors import ApiError, shown
from api.prompts import Prompt
from api.schemas.forms import Form
from api.schemas.openai import ChatRequest, NamedChoice, Tool
from api.service import LoadedEngine


class Calls(NamedTuple):
    """The tools that an answer may call, whether it must, and how many calls it may have (None: as the model's form allows)."""

    tools: list[Tool]
    required: bool
    most: int | None


def calls_of(engine: LoadedEngine, params: ChatRequest) -> Calls:
    """Return what a request lets the model call; raise ApiError for a choice among tools that it does not have."""
    choice = params.tool_choice or "auto"
    most = None if params.parallel_tool_calls else 1
    if isinstance(choice, NamedChoice):
        chosen = [tool for tool in params.tools if tool.function.name == choice.function.name]
        if not chosen:
            names = ", ".join(tool.function.name for tool in params.tools) or "none"
            raise ApiError(
                f"tool_choice names the function {shown(choice.function.name)}, but the functions in tools are: "
                f"{names[:400]}. Name one of these", param="tool_choice",
            )  # fmt: skip
        return Calls(chosen, True, 1)
    if choice == "required" and not params.tools:
        raise ApiError('tool_choice is "required", but tools has no function. Send one', param="tool_choice")
    if engine.device == "none" and choice == "auto":  # a model without weights decides nothing
        choice, most = ("auto", 0) if _has_result(params) else ("required", most)
    return Calls([] if choice == "none" else params.tools, choice == "required", most)


def _has_result(params: ChatRequest) -> bool:
    """Return whether a tool has answered since the assistant last spoke."""
    speakers = [message.role for message in params.messages if message.role in ("assistant", "tool")]
    return bool(speakers) and speakers[-1] == "tool"


def template_variables(engine: LoadedEngine, params: ChatRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of those variables that the template reads beside the messages."""
    read = engine.tokenizer.tool_format.variables
    values: dict[str, Any] = {"tools": tools or None} if "tools" in read else {}
    if params.reasoning_effort is not None:
        values["reasoning_effort"] = params.reasoning_effort
    if params.reasoning_effort == "none":
        values["enable_thinking"] = False
    values |= {name: value for name, value in params.chat_template_kwargs.items() if name != "tools"}
    return {name: value for name, value in values.items() if name in read}


def described(calls: Calls) -> list[dict[str, Any]]:
    """Return the tools as templates read them."""
    fields: Any = {"type": True, "function": {"name", "description", "parameters"}}
    return [tool.model_dump(include=fields, exclude_none=True) for tool in calls.tools]


def shape(engine: LoadedEngine, params: ChatRequest, calls: Calls, prompt: Prompt, options: dict[str, Any]) -> Any:
    """Constrain an answer to calls, to a form or to either, after its thinking part; adds to the options of `make_inference`.

    Return what makes the parts of an answer (`AnswerParts`), or None where it is content alone.
    """
    calls = calls._replace(tools=[]) if calls.most == 0 else calls  # they are in the prompt alone
    written = engine.tokenizer.tool_format
    continued = params.messages[-1].content if params.continue_final_message else None
    thinking = written.thinking_after(prompt.text, continued)
    form = params.form
    if form is None and engine.device == "none" and _has_result(params):  # the loops of agents end with a whole answer
        form = "messages", Form("choice", ["Done."])
    if form is not None and (calls.tools or thinking == "none"):  # so that an error names its own field
        options["grammar"] = constraint(engine, *form)
    if not calls.tools and thinking == "none":
        return None
    options["thinking"] = thinking
    names = [tool.function.name for tool in calls.tools]
    if calls.tools or form is not None:
        # In errors, so with the tool's name, which may have a dot unlike those of grammars.
        keys = [f"tool_{i}_{name.replace('.', '_')}" if "." in name else f"tool-{name}" for i, name in enumerate(names)]
        parts = {key: ("json", schema) for key, tool in zip(keys, calls.tools) if (schema := _schema(tool))}
        loose = [key for key, tool in zip(keys, calls.tools) if not tool.function.strict]
        arguments = {name: f"@{key}" if key in parts else None for name, key in zip(names, keys)}
        text = None if calls.required else written.free
        if form is not None and text is not None:
            parts["form"], text = form[1][:2], "@form"
        lark = written.grammar(arguments, text, thinking, **({} if calls.most is None else {"most": calls.most}))
        field = "tools" if form is None or calls.tools else form[0]
        options["grammar"] = constraint(engine, field, Form("lark", lark, parts, loose))
    if written.control:  # these words must be seen; the grammar or the template lets no others appear
        options["hide_special"] = False
    return lambda: AnswerParts(written, names, thinking, required=calls.required)


def parts_of(engine: LoadedEngine, generation: Generation) -> AnswerParts:
    """Return what takes an answer apart, if only to find that all of it is content."""
    make = generation.request.parts
    return make() if make is not None else AnswerParts(engine.tokenizer.tool_format, (), "none")


def _schema(tool: Tool) -> dict[str, Any] | None:
    """Return the schema of the arguments: of an object that has no other keys than the schema's, as a rule."""
    schema = tool.function.parameters
    if schema is None:
        return None
    is_plain = "properties" in schema and not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
    return {"type": "object", **({"additionalProperties": False} if is_plain else {}), **schema}

"""A model's chat template: from messages to the text of a prompt, in which only the template writes control tokens.

What users wrote may contain the text of a control token, such as "<|im_end|>". Before the template runs, that text is
replaced by a random placeholder, and the tokenizer puts it back as ordinary text. A conversation without such texts is
rendered as transformers renders it. This module must not know how a text is encoded.

The arguments of a tool call are JSON in a string, as in OpenAI's API. Some templates write them as JSON and want objects,
others join them to a text and want strings; so both are tried, and then an object with the text of a call that was cut.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from models.text.ranks import TokenizerError
from models.text.template_sandbox import Sandbox, TemplateError, TooMuch
from models.text.vocabulary import text_pattern

LONGEST_SOURCE = 1 << 17  # characters; the longest that is published has some 20,000
PRIVATE = range(0xE000, 0xF900)  # code points that no text uses
Message = Mapping[str, Any]
GREETING: list[Message] = [{"role": "user", "content": "Hello"}]
BRIEF: Message = {"role": "system", "content": "Be brief."}
SYSTEM = ("system", "developer")  # roles


@dataclass
class Rendered:
    """A prompt in which each of the marks `quoted` stands for ordinary text."""

    text: str
    quoted: dict[str, str] = field(default_factory=dict)

    def plain(self) -> str:
        """Return the text with what the marks stand for."""
        return text_pattern(self.quoted).sub(lambda mark: self.quoted[mark.group()], self.text)


class ChatTemplate:
    """A compiled template; `names` is what it knows of the tokenizer, `control` the texts of the control tokens.

    `variables` are those that it reads of a request, such as "tools" and "enable_thinking"; with `takes_system` a
    conversation may begin with a system message, and with `takes_late_system` it may have others.

    Raises TokenizerError for a template that cannot be compiled, is too long, or computes too much for a greeting.
    """

    def __init__(self, source: str, names: Mapping[str, str], control: Iterable[str]) -> None:
        self._names = dict(names)
        self._control = text_pattern(control)
        self._first = text_pattern({text[:1] for text in control})
        # A template that never mentions developers would refuse them, or drop what they say.
        self._developer = "developer" if "developer" in source else "system"
        remedy = "Correct the model's chat template, or use another model"
        if len(source) > LONGEST_SOURCE:
            raise TokenizerError(
                f"the chat template has {len(source):,} characters, but may have at most {LONGEST_SOURCE:,}. {remedy}"
            )
        try:
            self._template = Sandbox(source)
        except TemplateError as error:
            raise TokenizerError(f"the chat template cannot be compiled: {_reason(error)}. {remedy}") from error
        self.variables = self._template.variables - names.keys() - {"messages", "add_generation_prompt"}
        conversations = [GREETING, [BRIEF, *GREETING], [*GREETING, BRIEF]]
        probes = [self._values({"messages": each, "add_generation_prompt": True}) for each in conversations]
        try:
            self._template.try_out(*probes)
        except TooMuch as error:
            raise TokenizerError(f"the chat template is refused: {_reason(error)}. {remedy}") from error
        greets, brief, late = map(self._written, probes)
        # One that refuses a greeting needs something else; `render` reports it for each conversation.
        self.takes_system, self.takes_late_system = (not greets or BRIEF["content"] in text for text in (brief, late))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the prompt of a conversation. Raises TemplateError where the template refuses it.

        With `continues` it ends with the text of the last message. `variables`, such as the tools, are quoted as the
        messages are.
        """
        values = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        if not self.takes_late_system and any(message["role"] in SYSTEM for message in messages[1:]):
            texts = [message["content"] for message in messages if message["role"] in SYSTEM]
            others = [message for message in messages if message["role"] not in SYSTEM]
            messages = [{"role": "system", "content": "\n\n".join(texts)}, *others]
        refusal: TemplateError | None = None
        for form in _forms(messages):
            try:
                return self._render_safely(values | {"messages": form}, continues)
            except TemplateError as error:
                refusal = refusal or error
                if isinstance(error.__cause__, TooMuch):
                    break
        assert refusal is not None
        raise refusal

    def _render_safely(self, values: Mapping[str, Any], continues: bool) -> Rendered:
        as_written = self._render(values, continues, self._control)
        if not any(map(self._first.search, _texts(list(values.values())))):
            return as_written
        # A template may cut a message so that its parts join to a control token. Then nothing that can begin one passes.
        opaque = self._render(values, continues, self._first)
        same = self._control.findall(as_written.text) == self._control.findall(opaque.text)
        return as_written if same else opaque

    def _render(self, values: Mapping[str, Any], continues: bool, hidden: re.Pattern[str]) -> Rendered:
        secret = "".join(chr(secrets.choice(PRIVATE)) for _ in range(8))
        marks: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            return marks.setdefault(match.group(), secret + chr(PRIVATE[len(marks)]))

        def role_of(message: Message) -> str:
            role = str(message["role"])
            return self._developer if role == "developer" else role

        hide = hidden.sub

        def quoted(value: Any) -> Any:
            return _replaced(value, lambda text: hide(mark, text))

        messages = [
            {name: role_of(message) if name == "role" else quoted(value) for name, value in message.items()}
            for message in values["messages"]
        ]
        others = {name: quoted(value) for name, value in values.items() if name != "messages"}
        end = f"{secret}{secret} "  # its space shows whether the template keeps the one at the end of a message
        if continues:
            messages[-1]["content"] += end
        try:
            text = self._template.render(self._values({**others, "messages": messages}))
        except Exception as error:  # whatever a template does wrong concerns this conversation alone
            reason = _reason(error)
            raise TemplateError(f"the model's chat template refuses these messages: {reason}") from error
        if continues:
            before, found, behind = text.rpartition(end.rstrip())
            if not found:
                raise TemplateError(
                    "the model's chat template does not write the last message, so none can be continued"
                )
            text = before if behind.startswith(" ") else before.rstrip()
        return Rendered(text, {mark: text for text, mark in marks.items()})

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"tools": None, "documents": None, **values, **self._names}

    def _written(self, values: Mapping[str, Any]) -> str:
        """Return a prompt, empty if the template refuses it."""
        with suppress(Exception):  # whatever a template does wrong
            return self._template.render(values)
        return ""


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the forms of a conversation that a template may want, the usual one first."""
    calling = [message for message in messages if message.get("tool_calls")]
    if not calling:
        yield messages
        return
    # A template may write calls only where the content is null, or fail there, as it adds the content to a text.
    for silence in (None, "") if any(message.get("content") is None for message in calling) else ("",):
        for convert in (_as_object, as_text, _in_object):
            yield [_called(message, silence, convert) if message.get("tool_calls") else message for message in messages]


def _called(message: Message, silence: str | None, convert: Callable[[Any], Any]) -> Message:
    """Return a copy of a message with tool calls, with another form of its arguments and of content that is null."""
    content = message.get("content")
    calls = [
        {**call, "function": {**call["function"], "arguments": convert(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": silence if content is None else content, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object, or as they are where they are not JSON; none are an empty object."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments


def _in_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object in any case, with their text in it where they are none."""
    value = _as_object(arguments)
    return value if isinstance(value, dict) else {"text": arguments}


def as_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON in a string."""
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(_as_object(arguments), ensure_ascii=False)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """Return a copy of JSON in which all strings are replaced."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list):
        return [_replaced(item, replace) for item in value]
    if isinstance(value, dict):
        return {replace(name): _replaced(item, replace) for name, item in value.items()}
    return value


def _texts(value: Any) -> list[str]:
    """Return all strings of JSON."""
    found: list[str] = []
    _replaced(value, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    return found


def _reason(error: BaseException) -> str:
    """Return an error's first line, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else type(error).__name__

"""A model's chat template: from messages to the text of a prompt, in which only the template writes control tokens.

What users wrote may contain the text of a control token, such as "<|im_end|>". Before the template runs, that text is
replaced by a random placeholder, and the tokenizer puts it back as ordinary text. A conversation without such texts is
rendered as transformers renders it. This module must not know how a text is encoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from models.ranks import TokenizerError
from models.template_sandbox import Sandbox, TemplateError
from models.template_work import MOST_TEXT, Budget, TooMuch, budget
from models.vocabulary import text_pattern

LONGEST_SOURCE = 1 << 17  # characters; the longest that is published has some 20,000
PRIVATE = range(0xE000, 0xF900)  # code points that no text uses
Message = Mapping[str, Any]


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

    Raises TokenizerError for a template that cannot be compiled, is too long, or fails on a greeting because it
    computes too much or reaches out of the sandbox.
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
            self._template = Sandbox().compile_template(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TokenizerError(f"the chat template cannot be compiled: {_reason(error)}. {remedy}") from error
        try:
            self._run([{"role": "user", "content": "Hello"}], True)
        except (TooMuch, jinja2.exceptions.SecurityError, RecursionError) as error:
            raise TokenizerError(f"the chat template is refused: {_reason(error)}. {remedy}") from error
        except Exception:  # such as a template that needs a system message; `render` reports it for each conversation
            return

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> Rendered:
        """Return the prompt of a conversation. Raises TemplateError where the template refuses it."""
        as_written = self._render(messages, add_generation_prompt, self._control)
        if not any(map(self._first.search, _texts(list(messages)))):
            return as_written
        # A template may cut a message so that its parts join to a control token. Then nothing that can begin one passes.
        opaque = self._render(messages, add_generation_prompt, self._first)
        same = self._control.findall(as_written.text) == self._control.findall(opaque.text)
        return as_written if same else opaque

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, hidden: re.Pattern[str]) -> Rendered:
        secret = "".join(chr(secrets.choice(PRIVATE)) for _ in range(8))
        marks: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            return marks.setdefault(match.group(), secret + chr(PRIVATE[len(marks)]))

        def role_of(message: Message) -> str:
            role = str(message["role"])
            return self._developer if role == "developer" else role

        hide = hidden.sub
        quoted = [
            {name: role_of(message) if name == "role" else _replaced(value, lambda text: hide(mark, text))
             for name, value in message.items()}
            for message in messages
        ]  # fmt: skip
        try:
            text = self._run(quoted, add_generation_prompt)
        except Exception as error:  # whatever a template does wrong concerns this conversation alone
            reason = _reason(error)
            raise TemplateError(f"the model's chat template refuses these messages: {reason}") from error
        return Rendered(text, {mark: text for text, mark in marks.items()})

    def _run(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        reset = budget.set(Budget())
        size, parts = 0, []
        try:
            for part in self._template.generate(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            ):
                size += len(part)
                if size > MOST_TEXT:
                    raise TooMuch(f"it makes a text of more than {MOST_TEXT:,} characters")
                parts.append(part)
        finally:
            budget.reset(reset)
        return "".join(parts)


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
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else type(error).__name__

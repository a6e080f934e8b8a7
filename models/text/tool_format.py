"""How a family of models writes tool calls, found in the source of its chat template, and the grammar of its answers.

A template that does not read `tools`, and a model without a template, get the generic form: the system message lists the
tools, and calls and results are text. The grammar is llguidance's dialect of Lark. In it the names of tools are JSON
strings, and schemas have names of their own, so that no word of a tool changes it. This module must not know HTTP or how
text is encoded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

from models.text.chat_template import as_text
from models.text.vocabulary import text_pattern

Thinking = Literal["none", "maybe", "open"]  # "open": the prompt has begun the thinking part
OPEN, CLOSE = "<think>", "</think>"
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", OPEN, CLOSE)  # that may be control tokens
MOST_CALLS = 16  # in one answer: a small model may never stop by itself
FREE = "TEXT"  # the rule of text that has no form
NO_ARGUMENTS = json.dumps("{}")
INSTRUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# Without such words, very small models repeat the result, or call the tool again.
ENOUGH = "\n\nIf that is enough, answer my question in plain words."


@dataclass(frozen=True)
class ToolFormat:
    """The words around a call: `marker begin (head NAME middle ARGUMENTS tail) between (...) end`.

    Without a `marker`, a call is the whole answer. `control` has the ids of those words that are control tokens.
    """

    thinking_tags: ClassVar = (OPEN, CLOSE)
    free: ClassVar = FREE
    marker: str = "<tool_call>"
    begin: str = "\n"
    head: str = '{"name": "'
    middle: str = '", "arguments": '
    tail: str = "}"
    between: str = "\n</tool_call>\n<tool_call>\n"
    end: str = "\n</tool_call>"
    most: int = MOST_CALLS
    control: Mapping[str, int] = field(default_factory=dict)
    variables: frozenset[str] = frozenset()  # that the template reads from a request
    reads_calls: bool = False  # the template writes `tool_calls` of the history
    reads_results: bool = False  # and the role `tool`
    takes_system: bool = True
    thinks: bool = False  # an answer may begin with a thinking part

    @property
    def opening(self) -> str:
        """What begins the first call, up to its name."""
        return self.marker + self.begin + self.head

    def thinking_after(self, prompt: str, continued: str | None = None) -> Thinking:
        """Return whether an answer begins with, or within, a thinking part; `continued` is the message that it continues."""
        if not self.thinks:
            return "none"
        if continued is not None:
            return "open" if continued.rfind(OPEN) > continued.rfind(CLOSE) else "none"
        end = prompt.rstrip()
        return "open" if end.endswith(OPEN) else "none" if end.endswith(CLOSE) else "maybe"

    def grammar(
        self, tools: Mapping[str, str | None], text: str | None, thinking: Thinking = "none", most: int = MOST_CALLS
    ) -> str:
        """Return the grammar of answers that call 1 to `most` tools, or have `text` instead, after a thinking part.

        `tools` are names with the expression of their arguments, such as `@schema`, None for `{}`. `text` is an expression,
        FREE for any text, which calls may follow, or None where a call is required.
        """
        rules, answers = ["%llguidance {}"], [] if text is None else [text]
        if tools:
            calls = f"{self._words(self.begin)} call"
            if min(most, self.most) > 1:
                calls += f" ({self._words(self.tail + self.between)} call){{0,{min(most, self.most) - 1}}}"
            calls += f" {self._words(self.tail + self.end)}"
            marker = self._words(self.marker)
            if text == FREE and self.marker in self.control:
                marker = f"TEXT {marker}"
            elif text == FREE and self.marker:
                # Text and marker are one lexeme, which ends as soon as it can: the longest match would be the text.
                rules.append(f"marked[lazy]: TEXT {marker}")
                marker = "marked"
            answers.append(f"{marker} {calls}")
            rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
            for i, (name, arguments) in enumerate(tools.items()):
                rules.append(f"call_{i}: {self._words(self.head + name + self.middle)} {arguments or NO_ARGUMENTS}")
        if FREE in answers:
            rules.append(f"TEXT: /(.|\\n)*/{self._excluded(bool(tools), thinking)}")
        if thinking != "none":
            is_lazy = "" if CLOSE in self.control else "[lazy]"
            rules += [f"thought{is_lazy}: /(.|\\n)*/ {self._words(CLOSE)}", f"thinks: {self._words(OPEN)} thought"]
        begins = {"none": "answer", "maybe": "thinks {gap} answer | answer", "open": "thought {gap} answer"}[thinking]
        rules.append(f"answer: {' | '.join(answers)}")
        rules.append("start: " + begins.format(gap="" if text == FREE else r'"\n\n"'))
        return "\n".join(rules) + "\n"

    def _words(self, text: str) -> str:
        """Return a text in the words of a grammar, in which a control token is written as its id."""
        parts = re.split(f"({text_pattern(self.control).pattern})", text)
        return " ".join(
            f"<[{self.control[part]}]>" if part in self.control else json.dumps(part) for part in parts if part
        )

    def _excluded(self, has_tools: bool, thinking: Thinking) -> str:
        """Return what no text may contain: a call or a thinking part that would escape the grammar."""
        texts = [rf"\s*{OPEN}(.|\n)*"] if thinking == "maybe" else []
        if has_tools and self.marker:
            texts.append(rf"(.|\n)*{re.escape(self.marker)}(.|\n)*")
        elif has_tools:
            texts.append(r'\s*\{\s*"name"(.|\n)*')
        return "".join(f" & ~/{text}/" for text in texts)

    def history(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the messages as the template can read them: it gets as text what it has no words for."""
        written = [self._as_text(self._with_short_ids(message)) for message in messages]
        if tools and "tools" not in self.variables:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            text, first = INSTRUCTION.format(tools=listed), written[0]
            if first["role"] in ("system", "developer"):
                written[0] = first | {"content": f"{first['content']}\n\n{text}"}
            elif self.takes_system or first["role"] != "user":
                written.insert(0, {"role": "system", "content": text})
            else:
                written[0] = first | {"content": f"{text}\n\n{first['content']}"}
        merged: list[dict[str, Any]] = []
        for is_result, group in groupby(written, lambda message: "is_result" in message):
            if is_result:  # in one message: templates may want turns to alternate
                results = "\n".join(message["content"] for message in group)
                merged.append({"role": "user", "content": results + ENOUGH})
            else:
                merged += group
        return merged

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool" and not self.reads_results:
            return {"role": "user", "content": f"The tool returned: {message['content']}", "is_result": True}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if not calls or self.reads_calls:
            return message
        each = [f"{self.head}{call['name']}{self.middle}{as_text(call.get('arguments'))}" for call in calls]
        text = self.marker + self.begin + (self.tail + self.between).join(each) + self.tail + self.end
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return others | {"content": "\n".join(filter(None, (message.get("content"), text)))}

    def _with_short_ids(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy in which calls have ids of nine letters and digits if the family is Mistral's, which wants these."""
        copy = dict(message)
        if self.marker == MISTRAL.marker and copy["role"] == "tool":
            copy["tool_call_id"] = _nine(copy.get("tool_call_id"))
        if self.marker == MISTRAL.marker and copy.get("tool_calls"):
            copy["tool_calls"] = [{**call, "id": _nine(call.get("id"))} for call in copy["tool_calls"]]
        return copy


HERMES = ToolFormat()
MISTRAL = ToolFormat("[TOOL_CALLS]", "[", between=", ", end="]")
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "", "", "[ARGS]", "", between="[TOOL_CALLS]", end="")
LLAMA3 = ToolFormat("", "", middle='", "parameters": ', between="", end="", most=1)


def format_of(
    template: str | None, variables: Collection[str], control: Mapping[str, int], takes_system: bool = True
) -> ToolFormat:
    """Return how a model writes calls, by its template's source, and by the `variables` that the template reads."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        family = MISTRAL_ARGS if "[ARGS]" in source else MISTRAL
    elif "tools" in variables and "<tool_call>" not in source and re.search(r'"parameters\\?": ', source):
        family = LLAMA3
    else:
        family = HERMES
    return replace(
        family,
        control={text: id for text, id in control.items() if text in MARKERS},
        variables=frozenset(variables),
        reads_calls="tool_calls" in source,
        reads_results="tool_calls" in source or re.search(r"""==\s*["']tool["']""", source) is not None,
        takes_system=takes_system,
        thinks=CLOSE in source,
    )


def _nine(id: Any) -> str:
    text = str(id)
    is_short = re.fullmatch("[A-Za-z0-9]{9}", text)
    return text if is_short else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]

"""Where a chat template runs: minijinja, which has neither files nor Python's attributes, with bounded fuel.

A template comes from the model's author, who may be a stranger. Fuel bounds its steps and the texts that it makes. The few
operations that take long without burning any, such as comparing large lists, only a process can end: so a template first
greets in one, whose processor time and memory are limited. It must not know messages or tokens.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import minijinja

FUEL = 2_000_000  # a message takes 10 to 100, and a text that is made one for about each character
MOST_TEXT = 4 << 20  # characters of a rendering
TRIAL_SECONDS, TRIAL_BYTES = 2, 1 << 30
TRIAL_FAILED = 3
# Tags by which templates mark the assistant's part for training.
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class TemplateError(ValueError):
    """A chat template cannot be used, or refuses a conversation."""


class TooMuch(TemplateError):
    """A template computes more than it may, so that no other form of the messages helps."""


class Sandbox:
    """A compiled template; `variables` are those that it reads, which nothing else sets.

    Raises TemplateError for one that cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        self._source = GENERATION.sub("", source)
        self._environment = minijinja.Environment(
            fuel=FUEL, debug=False, trim_blocks=True, lstrip_blocks=True, finalizer=_written, filters={"tojson": tojson},
            globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
        )  # fmt: skip
        try:
            self._environment.add_template("chat", self._source)
            self.variables = frozenset(self._environment.undeclared_variables_in_template("chat"))
        except minijinja.TemplateError as error:
            raise TemplateError(error.message) from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text. Raises TemplateError where the template refuses the values, and TooMuch."""
        try:
            text = self._environment.render_template("chat", **values)
        except minijinja.TemplateError as error:
            if "fuel" in error.message:
                raise TooMuch("it takes too many steps, or makes too much text") from error
            raise TemplateError(error.message) from error
        if len(text) > MOST_TEXT:
            raise TooMuch(f"it makes a text of more than {MOST_TEXT:,} characters")
        return str(text)

    def try_out(self, *values: Mapping[str, Any]) -> None:
        """Render these values in a process of its own. Raises TooMuch if it does not end, or takes too much memory."""
        asked = json.dumps([self._source, values])
        done = subprocess.run([sys.executable, __file__], input=asked, capture_output=True, text=True)
        if done.returncode:
            raise TooMuch(f"it takes more than {TRIAL_SECONDS} s, or more than {TRIAL_BYTES >> 30} GiB")


def _written(value: Any) -> Any:
    """Write null, as of the content beside tool calls, as nothing."""
    return "" if value is None else value


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse a conversation, in the words of the template."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the time of day."""
    return datetime.now().strftime(format[:1000])


def _trial() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_SECONDS, TRIAL_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    source, values = json.load(sys.stdin)
    for each in values:
        try:
            Sandbox(source).render(each)
        except TooMuch:
            sys.exit(TRIAL_FAILED)
        except ValueError:  # whatever a template does wrong concerns the conversation alone
            pass


if __name__ == "__main__":
    _trial()

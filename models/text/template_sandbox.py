"""Where a chat template runs: Jinja2's sandbox as transformers sets it up, with bounds on work and on sizes.

A template comes from the model's author, who may be a stranger. It gets no files and no attributes of Python's own, and its steps,
its work and the texts that it makes are bounded (`models/text/template_work.py`). It must not know messages or tokens.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.text import template_work as work
from models.text.template_syntax import Bounds, Generation
from models.text.template_work import (
    ITEM,
    MOST_ITEMS,
    MOST_NUMBER,
    MOST_TEXT,
    MOST_WIDTH,
    TooMuch,
    made,
    size,
    spend,
    writes,
)

# What a template may call of a value. Others make a text of any length from a number, or bytes, or change it.
METHODS = {
    str: frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
        "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
        "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    }),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    bytes: frozenset(),
}  # fmt: skip
# Their work or their text grows faster than what they are given, and no chat template needs them.
REFUSED_FILTERS = (
    "center", "filesizeformat", "format", "pprint", "random", "striptags", "urlize", "wordcount", "wordwrap", "xmlattr"
)  # fmt: skip
# These look at a collection, not into what it holds; all others may go through the whole.
SHALLOW = {
    "attr", "batch", "boolean", "callable", "count", "d", "default", "defined", "divisibleby", "even", "false", "filter",
    "first", "float", "integer", "items", "iterable", "last", "length", "list", "map", "mapping", "none", "number", "odd",
    "reject", "rejectattr", "reverse", "sameas", "select", "selectattr", "sequence", "slice", "string test", "test", "true",
    "undefined",
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge, "lt": operator.lt, "lteq": operator.le,
    "in": lambda value, container: value in container, "notin": lambda value, container: value not in container,
}  # fmt: skip
SORTING = 20  # comparisons of each item, at most


class TemplateError(ValueError):
    """A chat template cannot be used, or refuses a conversation."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,
            finalize=written,
        )
        self.filters["tojson"] = tojson
        for name in REFUSED_FILTERS:
            self.filters.pop(name, None)
        for name, filter in self.filters.items():
            self.filters[name] = work.counted(filter, name not in SHALLOW, CHECKS.get(name))
        for name, test in self.tests.items():
            kind = "string test" if name == "string" else name
            self.tests[name] = work.counted(test, kind not in SHALLOW, contains if name == "in" else None)
        self.filters |= {"_compare": compare, "_join": join, "_key": key, "_slice": cut, "_step": step, "_item": item}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = make_dict
        self.globals.pop("lipsum", None)

    def compile_template(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """Return a template that counts its steps, and the variables that it reads, which nothing else sets.

        Raises Jinja2's errors for one that cannot be compiled.
        """
        variables = find_undeclared_variables(self.parse(source)) - self.globals.keys()
        tree = Bounds().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), dict(self.globals)), frozenset(variables)

    def wrap_str_format(self, value: Any) -> None:
        """Refuse `format`, which Jinja2 would offer although it is no safe attribute."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return bool(super().is_safe_attribute(obj, attr, value))

    def getitem(self, obj: Any, argument: Any) -> Any:
        spend(work.shallow(argument))
        return super().getitem(obj, key(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        values = (left, right)
        numbers = [abs(value) for value in values if isinstance(value, int)]
        if (operator == "**" and max(numbers, default=0) > MOST_WIDTH) or max(numbers, default=0) > 1 << 64:
            raise TooMuch("it computes with too large a number")
        if operator == "*" and numbers:
            length = sum(len(value) for value in values if isinstance(value, str))
            items = sum(len(value) for value in values if isinstance(value, list | tuple))
            if numbers[0] * length > MOST_TEXT or numbers[0] * items > MOST_ITEMS:
                raise work.too_long()
        elif operator == "%" and isinstance(left, str):
            if re.search(r"\*|\d{4}", left):
                raise work.too_long()
            writes(left)
            writes(right, MOST_TEXT / max(1, left.count("%")))
        spend(work.shallow(left) + work.shallow(right))
        return made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(n, int) and abs(n) > MOST_NUMBER for n in (*args, *kwargs.values())):
            raise TooMuch(f"it uses a number above {MOST_NUMBER:,}")
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            args = tuple(map(work.used, args))
            if name == "join":
                work.joins(owner, *args)
            else:
                work.searches(name, owner, args)
                if name == "replace":
                    work.replaces(owner, *args)
        elif isinstance(owner, list | tuple):
            spend(size(owner))
        for value in (owner, *args, *kwargs.values()):
            spend(work.shallow(value))
        if isinstance(owner, dict) and args:
            key(args[0])
        return made(super().call(__context, __obj, *args, **kwargs))


@jinja2.pass_context
def written(context: Any, value: Any) -> Any:
    """Count what a template writes; null, as of the content beside tool calls, is written as nothing."""
    if value is None:
        return ""
    if not isinstance(value, str):
        writes(value)
        return value
    return made(value)


def step(length: int) -> str:
    """Count a step that writes so many characters of the template itself."""
    work.step(length)
    return ""


def item(value: bool) -> bool:
    """Count an item that a loop may leave out."""
    spend(ITEM)
    return value


def compare(left: Any, *rest: Any) -> bool:
    """Compare values as Python does, each with the next."""
    for name, right in zip(rest[::2], rest[1::2]):
        if name in ("in", "notin"):
            left, right = work.used(left), work.used(right)
            contains(left, right)
        else:
            spend(min(size(left), size(right)))
        if not COMPARISONS[name](left, right):
            return False
        left = right
    return True


def contains(value: Any, container: Any) -> None:
    """Count the search for a value."""
    if isinstance(container, str):
        work.searches("in", container, (value,))
    elif isinstance(container, dict):
        spend(size(key(value)))
    else:
        spend(size(container) + size(value))


def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return a slice."""
    spend(work.shallow(value))
    return made(value[start:stop:step])


def key(value: Any) -> Any:
    """Return what finds an item; a collection would be gone through each time."""
    if isinstance(value, list | tuple | dict):
        raise TooMuch("it uses a list or an object as a key")
    return value


def make_dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    """Return a dictionary of pairs or of another one, and of named values."""
    found: dict[Any, Any] = {}
    for given in pairs:
        for name, value in given.items() if isinstance(given, dict) else work.used(given):
            spend(ITEM + work.shallow(name))
            found[key(name)] = value
    return found | values


def join(*parts: Any) -> str:
    """Join what `~` joins."""
    writes(parts)
    return str(made("".join(map(str, parts))))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: unlike Jinja2's own filter, without HTML escapes."""
    writes(value)
    if isinstance(indent, str) or (indent or 0) > 16 or size(separators or ()) > 4 * ITEM:
        raise TooMuch("it writes JSON with more than 16 spaces, or with long separators")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse a conversation, in the words of the template."""
    writes(message)
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the time of day."""
    if len(format) > MOST_WIDTH:
        raise work.too_long()
    return datetime.now().strftime(format)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_width(text, width)
    each = len(width) if isinstance(width, str) else abs(width)
    if (1 + str(text).count("\n")) * each > MOST_TEXT:
        raise work.too_long()


def _check_join(context: Any, items: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    work.joins(str(separator), items)


def _check_replace(context: Any, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    work.searches("replace", str(text), (old,))
    work.replaces(str(text), old, new)


def _check_trim(text: Any, chars: Any = None, *_: Any) -> None:
    work.searches("trim", str(text), (chars,))


def _check_sum(environment: Any, items: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):  # each list would be a copy of those before it
        raise TooMuch("it adds up what are no numbers")


def _check_text(value: Any, *_: Any, **__: Any) -> None:
    writes(value)


def _check_sorting(*values: Any, **_: Any) -> None:
    spend(SORTING * sum(map(size, values)))


def _check_width(*values: Any, **named: Any) -> None:
    if any(isinstance(n, int) and abs(n) > MOST_WIDTH for n in (*values[1:], *named.values())):
        raise TooMuch(f"it uses a width or count above {MOST_WIDTH:,}")


CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_width, "dictsort": _check_sorting, "groupby": _check_sorting, "indent": _check_indent,
    "join": _check_join, "replace": _check_replace, "round": _check_width, "slice": _check_width, "sort": _check_sorting,
    "sum": _check_sum, "trim": _check_trim, "unique": _check_sorting,
    **dict.fromkeys(("capitalize", "e", "escape", "forceescape", "lower", "string", "title", "upper", "urlencode"), _check_text),
}  # fmt: skip

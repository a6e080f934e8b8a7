"""Where a chat template runs: Jinja2's sandbox as transformers sets it up, with bounds on work and on sizes.

A template comes from the model's author, who may be a stranger. It gets no files and no attributes of Python's own, and both its steps and
the texts that it makes are bounded. It must not know messages or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 20_000  # iterations and calls of macros in one rendering
MOST_TEXT = 4 << 20  # characters or items that one operation makes
MOST_WORK = 256 << 20  # the same for all operations of one rendering
MOST_NUMBER = 1 << 20  # for counts
MOST_WIDTH = 1000
# These make a text of any length from a number in the template, and no chat template needs them.
REFUSED = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"}
REFUSED_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr")


class TemplateError(ValueError):
    """A chat template cannot be used, or refuses a conversation."""


class TooMuch(jinja2.exceptions.TemplateRuntimeError):
    """A template computes more than it may."""


class Budget:
    """What one rendering has left."""

    __slots__ = ("steps", "work")

    def __init__(self) -> None:
        self.steps = MOST_STEPS
        self.work = MOST_WORK


budget: ContextVar[Budget] = ContextVar("budget")


def step() -> str:
    """Count a step of the rendering."""
    left = budget.get()
    left.steps -= 1
    if left.steps < 0:
        raise TooMuch(f"it takes more than {MOST_STEPS:,} steps")
    return ""


def check(value: Any) -> None:
    """Count what an operation has made; raise TooMuch if it is too large."""
    if isinstance(value, str | list | tuple):
        left = budget.get()
        left.work -= len(value)
        if len(value) > MOST_TEXT or left.work < 0:
            raise too_long()


class Generation(Extension):
    """Ignores `{% generation %}`, by which templates mark the assistant's part for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters["tojson"] = tojson
        for name in REFUSED_FILTERS:
            self.filters.pop(name, None)
        for name in ("replace", "join", "indent", "string", "upper", "tojson", "list", "batch", "slice"):
            self.filters[name] = bounded(self.filters[name])
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.globals |= {"_join": join, "_step": step}
        self.globals.pop("lipsum", None)

    def compile_template(self, source: str) -> jinja2.Template:
        """Return a template that counts its steps. Raises Jinja2's errors for one that cannot be compiled."""
        tree = Bounds().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), dict(self.globals))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REFUSED and bool(super().is_safe_attribute(obj, attr, value))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = [abs(value) for value in (left, right) if isinstance(value, int)]
        lengths = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "*" and numbers and lengths and numbers[0] * lengths[0] > MOST_TEXT:
            raise too_long()
        if (operator == "**" and max(numbers, default=0) > MOST_WIDTH) or max(numbers, default=0) > 1 << 64:
            raise TooMuch("it computes with too large a number")
        if operator == "%" and isinstance(left, str) and re.search(r"\*|\d{4}", left):
            raise too_long()
        result = super().call_binop(context, operator, left, right)
        check(result)
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(n, int) and abs(n) > MOST_NUMBER for n in (*args, *kwargs.values())):
            raise TooMuch(f"it uses a number above {MOST_NUMBER:,}")
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in ("replace", "join"):
            check_product(name, owner, args)
        result = super().call(__context, __obj, *args, **kwargs)
        check(result)
        return result


class Bounds(NodeTransformer):
    """Adds a call of `_step` to each loop and macro of a template, and makes `~` a call of `_join`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("_join", node.nodes, node.lineno)

    def _refused(self, node: nodes.Node) -> nodes.Node:
        raise jinja2.exceptions.SecurityError("it asks for another file")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refused

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([self._call("_step", [], node.lineno)], lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    @staticmethod
    def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None, lineno=line)


def too_long() -> TooMuch:
    return TooMuch(f"it makes a text of more than {MOST_TEXT:,} characters")


def check_product(name: str, text: Any, args: Iterable[Any]) -> None:
    """Raise TooMuch before `replace` or `join` makes a text that is too long."""
    args = list(args)
    if name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        size = len(text) + (text.count(old) if isinstance(text, str) else len(text)) * len(new)
    elif name == "join" and args and isinstance(args[0], list | tuple):
        size = sum(len(item) + len(text) for item in args[0] if isinstance(item, str))
    else:
        return
    if size > MOST_TEXT:
        raise too_long()


def bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose arguments and result are bounded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if any(isinstance(n, int) and abs(n) > MOST_WIDTH for n in values):
            raise TooMuch(f"it uses a width or count above {MOST_WIDTH:,}")
        texts = [value for value in values if isinstance(value, str)]
        if filter.__name__ == "do_replace" and len(texts) >= 3:
            check_product("replace", texts[0], texts[1:])
        for value in values:
            if isinstance(value, list | tuple) and filter.__name__.endswith("do_join"):
                check_product("join", max(texts, key=len, default=""), [value])
        result = filter(*args, **kwargs)
        check(result)
        return result

    for name in ("jinja_pass_arg", "__name__"):  # how Jinja2 marks filters that want their context
        if hasattr(filter, name):
            setattr(call, name, getattr(filter, name))
    return call


def join(*parts: Any) -> str:
    """Join what `~` joins."""
    text = "".join(map(str, parts))
    check(text)
    return text


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: unlike Jinja2's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse a conversation, in the words of the template."""
    raise jinja2.exceptions.TemplateError(message)

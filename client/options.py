"""Command-line options on top of click, for the client, the simulator and the settings of the server.

An option is a flag, and where it has a variable also an environment variable and a line of a `.env` file. A flag wins over
the environment, and the environment over `.env`. An error names the option as the user wrote it, the value and the remedy.
This module must not know any particular option. It is in this folder because the client runs without the other folders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

ORIGINS: dict[ParameterSource | None, str] = {
    ParameterSource.COMMANDLINE: "flag", ParameterSource.ENVIRONMENT: "environment", ParameterSource.DEFAULT_MAP: ".env"
}  # fmt: skip
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


class UsageError(ValueError):
    """An invalid command line or setting; the message names the value, the bound and the remedy."""


def nearest(name: str, known: Iterable[str], question: str = "Did you mean") -> str:
    """Return a question that suggests the known name closest to `name`, or "" if none is close."""
    near = get_close_matches(name, list(known), 1)
    return f" {question} {near[0]!r}?" if near else ""


class Type(click.ParamType):  # type: ignore[type-arg]
    """Text without restrictions; a subclass overrides what it restricts."""

    name = "TEXT"  # stands for the value in --help
    bounds = ""
    wanted = "text"
    known: Sequence[str] = ()

    def parse(self, text: str) -> Any:
        """Return the value of a text; ValueError if it is invalid."""
        return text

    def check(self, value: Any) -> Any:
        """Return a value that needs no parsing; ValueError if it is invalid."""
        return value

    def explain(self, text: str, error: Exception) -> str:
        """Return the value and the remedy, as the rest of a sentence that begins with the option's name."""
        return f" is {text!r}.{nearest(str(text), self.known)} Use {self.wanted}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or param is None or ctx is None:
            return value  # a default
        return self.read(value, _written(param, ctx))

    def read(self, value: Any, name: str) -> Any:
        """Return the checked value of the option called `name`; UsageError if it is invalid."""
        try:
            return self.parse(value) if isinstance(value, str) else self.check(value)
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{name}{self.explain(value, error)}") from None

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


class Number(Type):
    """A finite number from `low` to `high`; `above`: greater than `low`."""

    def __init__(
        self, low: float, high: float = math.inf, kind: type = int, *, above: bool = False, name: str = "N"
    ) -> None:
        self.low, self.high, self.kind, self.above, self.name = low, high, kind, above, name
        limited = high < math.inf
        self.bounds = f">{low}" if above else f"{low}..{high if limited else ''}"
        least = f"above {low:,}" if above else f"of at least {low:,}"
        bound = f"from {low:,} to {high:,}" if limited else least
        self.wanted = f"{'a whole number' if kind is int else 'a number'} {bound}"

    def parse(self, text: str) -> Any:
        return self.check(self.kind(text))

    def check(self, value: Any) -> Any:
        if not (self.low <= value <= self.high) or math.isinf(value) or (self.above and value == self.low):
            raise ValueError("out of bounds")
        return value


class Size(Number):
    """A number of bytes, such as 512M or 1.5GiB."""

    def __init__(self) -> None:
        super().__init__(0, name="SIZE")
        self.wanted = "a size of at least 0, such as 512M"

    def parse(self, text: str) -> int:
        digits = text.upper().removesuffix("B").removesuffix("I")
        unit = digits[-1:] if digits[-1:] in UNITS else ""
        return int(self.check(float(digits.removesuffix(unit)) * UNITS[unit]))


class Choice(Type):
    """One of some texts."""

    def __init__(self, known: Iterable[str], name: str = "") -> None:
        self.known = tuple(known)
        self.name = name or "|".join(self.known)
        self.wanted = f"one of: {', '.join(self.known)}"

    def parse(self, text: str) -> str:
        if text not in self.known:
            raise ValueError("unknown")
        return text


class OnOff(Type):
    """A switch that is a word, so that a flag can turn off what the environment turns on."""

    name = "on|off"
    wanted = "on or off"

    def parse(self, text: str) -> bool:
        if text.lower() not in SWITCH:
            raise ValueError("unknown")
        return SWITCH[text.lower()]


class Secret(Type):
    """Text for an HTTP header, which no message shows."""

    def __init__(self, name: str = "TEXT") -> None:
        self.name = name

    def parse(self, text: str) -> str:
        if not (text.isascii() and text.isprintable()):
            raise ValueError("unprintable")
        return text

    def explain(self, text: str, error: Exception) -> str:
        return " has characters that are not allowed in an HTTP header. Use printable ASCII"


class Read(Type):
    """Text that a function reads or only checks; the text of its ValueError names the value and the remedy."""

    def __init__(self, read: Callable[[str], Any], name: str = "TEXT") -> None:
        self._read = read
        self.name = name

    def parse(self, text: str) -> Any:
        value = self._read(text)
        return text if value is None else value

    def explain(self, text: str, error: Exception) -> str:
        return f": {error}"


TEXT = Type()
FILE = Read(Path, "FILE")
FOLDER = Read(Path, "DIR")
POSITIVE = Number(0, kind=float, above=True)


class Parameter(click.Parameter):
    """An option or an argument; `variables` may set it too, the first of them first."""

    is_list = False
    shown_default: Any = None

    @property
    def variables(self) -> Sequence[str]:
        return [self.envvar] if isinstance(self.envvar, str) else self.envvar or []

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        environ: Mapping[str, str] = ctx.obj
        return next((environ[name] for name in self.variables if environ.get(name)), None)

    def brackets(self) -> str:
        """Return default, bounds and variable for --help."""
        default = self.shown_default
        if isinstance(default, bool):
            default = ("off", "on")[default] if isinstance(self.type, OnOff) else None
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
        shown = "none" if shown == "" and self.variables else "" if shown is None else str(shown)
        facts = ", ".join(filter(None, [shown, getattr(self.type, "bounds", "")]))
        text = "; ".join(filter(None, [facts, *self.variables[:1]]))
        return f" [{text}]" if text else ""


class Option(Parameter, click.Option):
    """A flag with a value of a type; without a type, a switch that takes no value.

    A flag with `several` takes one or more values, `--flag a b`; with `repeat` it may be given more than once. Both make a
    list, or the default.
    """

    def __init__(
        self, flag: str, help: str, type: Type | None = TEXT, *, default: Any = None, several: bool = False,
        repeat: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.several = several
        self.is_list = several or repeat
        super().__init__(
            [flag], help=help, type=type, is_flag=type is None or None, multiple=self.is_list,
            default=bool(default) if type is None else default, **options,
        )  # fmt: skip
        self.shown_default = default

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names = " / ".join([*self.opts, *self.secondary_opts])
        value = "" if self.is_flag else f" {self.metavar or self.type.name}"
        return (
            None
            if self.hidden
            else (f"{names}{value}{' ...' if self.several else ''}", (self.help or "") + self.brackets())
        )


class Argument(Parameter, click.Argument):
    """A word without a flag."""

    def __init__(self, name: str, help: str, type: Type = TEXT, *, default: Any = None, **options: Any) -> None:
        if default is not None and options.get("nargs") != -1:
            options["default"] = default
        super().__init__([name], type=type, **options)
        self.is_list = self.nargs == -1
        self.shown_default = default
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), (self.help or "") + self.brackets()


class Command(click.Command):
    """A command line: its parameters by section of the help, and the sections below them.

    A section of `more` is rows of a name and its description, or a text. A paragraph that begins with `\\b` keeps its lines.
    """

    def __init__(
        self,
        name: str,
        help: str,
        sections: Mapping[str, Sequence[Parameter]],
        more: Mapping[str, str | Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        self.declared = [param for params in sections.values() for param in params]
        super().__init__(name, params=[*self.declared], context_settings={"help_option_names": ["-h", "--help"]})
        self.text, self.sections, self.more = help, sections, more or {}

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"usage: {ctx.command_path} {' '.join(self.collect_usage_pieces(ctx))}\n\n")
        formatter.write_text(self.text)
        for title, params in self.sections.items():
            records = [param.get_help_record(ctx) for param in params]
            if rows := [record for record in records if record]:
                with formatter.section(title):
                    formatter.write_dl(rows)
        for title, content in self.more.items():
            if not isinstance(content, str):
                with formatter.section(title):
                    formatter.write_dl(content)
            elif content:
                formatter.write(f"\n{title}:\n" if title else "\n")
                formatter.write_text(content.rstrip())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(self._spread(args)))

    def _spread(self, words: Iterable[str]) -> Iterator[str]:
        """Repeat a flag with several values before each of them: `--load a b` becomes `--load a --load b`."""
        flags = {flag: param for param in self.params for flag in param.opts if isinstance(param, Option)}
        option, flag, needs_value = None, "", False
        for word in words:
            if needs_value and word in flags:
                raise click.UsageError(f"option {flag!r} requires an argument")
            if needs_value:
                needs_value = False
            elif word.startswith("-") and len(word) > 1:
                option, flag = flags.get(word), word
                needs_value = option is not None and not option.is_flag
            elif option is not None and option.several:
                yield flag
            yield word


class Values(SimpleNamespace):
    """The values of a command line by name; `origin` is flag, environment, .env or default for each."""

    origin: dict[str, str]

    def is_given(self, name: str) -> bool:
        """Return whether the option was on the command line."""
        return self.origin.get(name) == "flag"


def read(
    command: Command,
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    lines: Mapping[str, Any] | None = None,
) -> Values:
    """Return the values of a command line, an environment and the lines of a `.env` file.

    UsageError for what is wrong; --help prints and ends the process.
    """
    stored = {
        param.name: [lines[name]] if param.is_list else lines[name]
        for param in command.declared
        for name in reversed(param.variables)
        if lines and lines.get(name)
    }
    try:
        ctx = command.make_context(command.name, list(argv), obj=environ or {}, default_map=stored)
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.NoSuchOption as error:
        flags = [flag for param in command.params if isinstance(param, Option) for flag in param.opts]
        guess = nearest(error.option_name, flags)
        raise UsageError(f"unknown flag {error.option_name!r}.{guess} Run {command.name} --help") from None
    except click.UsageError as error:
        text = error.format_message().rstrip(".")
        raise UsageError(f"{text[:1].lower()}{text[1:]}. Run {command.name} --help") from None
    values = Values(origin={name: ORIGINS.get(ctx.get_parameter_source(name), "default") for name in ctx.params})
    for param in command.declared:
        value = ctx.params[str(param.name)]
        if param.is_list:
            value = list(value) if value or param.shown_default is not None else None
        setattr(values, str(param.name), value)
    return values


def _written(param: click.Parameter, ctx: click.Context) -> str:
    """Return the name of an option as the user wrote it: flag, variable or argument."""
    source = ORIGINS.get(ctx.get_parameter_source(str(param.name)))
    if isinstance(param, Parameter) and source in ("environment", ".env"):
        return str(param.variables[0])
    return param.opts[0] if isinstance(param, Option) else param.human_readable_name

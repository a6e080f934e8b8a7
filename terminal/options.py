"""Command lines on top of click, for the client, the simulator and the settings of the server.

An option is a flag, and where it has a variable also an environment variable and a line of a `.env` file. A flag wins over
the environment, and the environment over `.env`. An error names the option as the user wrote it, the value and the remedy.
This module must not know any particular option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

from .option_types import (
    FILE,
    FOLDER,
    KEY,
    POSITIVE,
    SWITCH,
    TEXT,
    Choice,
    Number,
    OnOff,
    Read,
    Size,
    Type,
    UsageError,
    nearest,
    read_pairs,
)
from .removed import removed
from .shell import as_called, printing

__all__ = [
    "FILE", "FOLDER", "KEY", "POSITIVE", "TEXT", "Argument", "Choice", "Command", "Number", "OnOff", "Option", "Parameter",
    "Read", "Section", "Size", "Type", "UsageError", "Values", "nearest", "read", "read_dotenv", "read_pairs",
]  # fmt: skip

ORIGINS: dict[ParameterSource | None, str] = {
    ParameterSource.COMMANDLINE: "flag", ParameterSource.ENVIRONMENT: "environment", ParameterSource.DEFAULT_MAP: ".env"
}  # fmt: skip


class Parameter(click.Parameter):
    """An option or an argument; environment variables may set it too, the first of them first."""

    is_list = False
    shown_default: Any = None

    @property
    def variables(self) -> Sequence[str]:
        return [self.envvar] if isinstance(self.envvar, str) else self.envvar or []

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return next((ctx.obj[name] for name in self.variables if ctx.obj.get(name)), None)

    def written(self, ctx: click.Context) -> str:
        """Return the name of the option as the user wrote it."""
        if ORIGINS.get(ctx.get_parameter_source(str(self.name))) in ("environment", ".env"):
            return self.variables[0]
        return self.opts[0] if self.param_type_name == "option" else self.human_readable_name

    def described(self) -> str:
        """Return the help with default, bounds and variable."""
        default = self.shown_default
        if isinstance(default, bool):
            default = ("off", "on")[default] if isinstance(self.type, OnOff) else None
        elif isinstance(default, list):
            default = " ".join(map(str, default))
        shown = "none" if default == "" and self.variables else "" if default is None else str(default)
        facts = ", ".join(filter(None, [shown, getattr(self.type, "bounds", "")]))
        brackets = "; ".join(filter(None, [facts, *self.variables[:1]]))
        text = as_called(str(self.help))
        return f"{text} [{brackets}]" if brackets else text


class Option(Parameter, click.Option):
    """A flag with a value of a type; without a type, a switch that takes no value.

    A flag with `several` takes one or more values, `--flag a b`; one with `repeat` may be given more than once. Both make
    a list, or the default.
    """

    def __init__(
        self, flag: str, help: str, type: Type | None = TEXT, *, default: Any = None, several: bool = False,
        repeat: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.several, self.is_list, self.shown_default = several, several or repeat, default
        default = bool(default) if type is None else default
        is_switch = True if type is None else None
        super().__init__(
            [flag], help=help, type=type, is_flag=is_switch, multiple=self.is_list, default=default, **options
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names = " / ".join([*self.opts, *self.secondary_opts])
        value = "" if self.is_flag else f" {self.metavar or self.type.name}{' ...' if self.several else ''}"
        return None if self.hidden else (names + value, self.described())


class Argument(Parameter, click.Argument):
    """A word without a flag."""

    def __init__(self, name: str, help: str, type: Type = TEXT, *, default: Any = None, **options: Any) -> None:
        self.is_list = options.get("nargs") == -1
        if default is not None and not self.is_list:
            options["default"] = default
        super().__init__([name], type=type, **options)
        self.help, self.shown_default = help, default

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.described()


Section = str | Sequence[tuple[str, str]]
KEPT_HYPHEN = "\u2011"
HELP_FLAGS = ["-h", "--help"]
WHOLE = "effective-batching.whole-help"  # in a context: whether --help shows every option


class HelpFormatter(click.HelpFormatter):
    """Click's formatter, except that no line ends within a name such as --kv-tokens."""

    def write_text(self, text: str) -> None:
        super().write_text(re.sub(r"\b-\b", KEPT_HYPHEN, text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, re.sub(r"\b-\b", KEPT_HYPHEN, text)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(KEPT_HYPHEN, "-")


class Context(click.Context):
    formatter_class = HelpFormatter


class Command(click.Command):
    """A command line: its parameters by section of the help, and the sections below them.

    A section of `more` is rows of a name and its description, or a text. A paragraph that begins with `\\b` keeps its lines.
    With `common`, names of options, `--help` shows only those, and `--help all` every one.
    """

    context_class = Context

    def __init__(
        self,
        name: str,
        help: str,
        sections: Mapping[str, Sequence[Parameter]],
        more: Mapping[str, Section] | None = None,
        common: Sequence[str] = (),
    ) -> None:
        self.declared = [param for params in sections.values() for param in params]
        super().__init__(as_called(name), params=[*self.declared], context_settings={"help_option_names": HELP_FLAGS})
        self.text, self.sections, self.more, self.common = as_called(help), sections, more or {}, common

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"usage: {ctx.command_path} {' '.join(self.collect_usage_pieces(ctx))}\n\n")
        formatter.write_text(self.text)
        sections, more = self.sections, self.more
        if self.common and not ctx.meta.get(WHOLE):
            named = {param.name: param for param in self.declared}
            sections = {"arguments": sections["arguments"], "common flags": [named[name] for name in self.common]}
            more = {**more, "": f"{ctx.command_path} --help all shows every flag."}
        records = {title: [param.get_help_record(ctx) for param in params] for title, params in sections.items()}
        options = {title: [record for record in some if record] for title, some in records.items()}
        for title, content in [*options.items(), *more.items()]:
            if isinstance(content, str):
                formatter.write(f"\n{title}:\n" if title else "\n")
                formatter.write_text(as_called(content).rstrip())
            elif content:
                with formatter.section(title):
                    formatter.write_dl(content)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WHOLE] = "all" in args and not {*HELP_FLAGS}.isdisjoint(args)
        return super().parse_args(ctx, [*self._spread(args)])

    def _spread(self, words: Sequence[str]) -> Iterator[str]:
        """Write a line out: `--load a b` becomes `--load a --load b`, and a flag that stands alone gets its value."""
        flags = {flag: param for param in self.params for flag in param.opts if isinstance(param, Option)}
        option, flag, needs_value = None, "", False
        for word, after in zip(words, [*words[1:], ""]):
            if needs_value and word in flags:
                raise click.UsageError(f"option {flag!r} requires an argument")
            if needs_value:
                needs_value = False
            elif word.startswith("-") and len(word) > 1:
                option, flag = flags.get(word), word
                needs_value = option is not None and not option.is_flag
                if option is not None and getattr(option.type, "alone", False) and after not in SWITCH:
                    word, needs_value = f"{word}=on", False
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
    command: Command, argv: Sequence[str], environ: Mapping[str, str] | None = None, dotenv: Path | None = None
) -> Values:
    """Return the values of a command line, an environment and a `.env` file.

    UsageError for what is wrong; --help prints and ends the process.
    """
    lines = read_dotenv(dotenv)
    stored = {
        param.name: [lines[name]] if param.is_list else lines[name]
        for param in command.declared
        for name in reversed(param.variables)
        if lines.get(name)
    }
    try:
        with printing():
            ctx = command.make_context(command.name, list(argv), obj=environ or {}, default_map=stored)
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.NoSuchOption as error:
        of_command = f"{re.split('[ .]', command.name or '')[-1]} {error.option_name}"
        if gone := removed(of_command) or removed(error.option_name):
            raise UsageError(gone) from None
        flags = [flag for param in command.params for flag in param.opts if flag.startswith("-")]
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


def read_dotenv(path: Path | None) -> Mapping[str, str]:
    """Return the lines of a `.env` file, none if it does not exist; UsageError if it cannot be read."""
    if path is None or not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return {name: text for name, text in dotenv_values(path, encoding="utf-8-sig").items() if text is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}. Use plain UTF-8 text") from None


def split(argv: Sequence[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that belong to these options, which take a value, and the others."""
    flags = {flag for option in options for flag in option.opts}
    own: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag in flags:
            own += [word] if equals else [word, *islice(words, 1)]
        else:
            others.append(word)
    return own, others

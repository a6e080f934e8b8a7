"""The types of options: what values they allow, how they read them, and the error with value, bound and remedy.

This module must not know flags, variables or files.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from .removed import removed

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
HOST_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # a browser leaves them out of an origin
SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


class UsageError(ValueError):
    """An invalid command line or setting; the message names the value, the bound and the remedy."""


def nearest(name: str, known: Iterable[str], question: str = "Did you mean") -> str:
    """Return a question that suggests the known name closest to `name`, or "" if none is close."""
    near = get_close_matches(name, list(known), 1)
    return f" {question} {near[0]!r}?" if near else ""


def pieces(text: str) -> list[str]:
    """Return the parts of a comma-separated list, without blank ones."""
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def read_pairs(texts: Iterable[str], flag: str, form: str = "") -> dict[str, str]:
    """Return the values of NAME=VALUE by name; UsageError for a text of another form.

    A text may hold several pairs, separated by commas. A piece without = continues the value before it.
    """
    found: dict[str, str] = {}
    last = ""
    for piece in pieces(",".join(texts)):
        if "=" in piece:
            last, _, found[last] = piece.partition("=")
        elif found:
            found[last] += f",{piece}"
        else:
            raise UsageError(f"{flag} is {piece!r}. Use {form or f'NAME=VALUE, as in {flag} {piece}=1'}")
    return found


def read_origins(text: str) -> frozenset[str]:
    """Return the web origins in a comma-separated list, as browsers write them; ValueError for one that none sends."""
    origins = set()
    for piece in pieces(text):
        origin = piece.lower()
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{piece!r} is not an origin. Use scheme://host or scheme://host:port without a path, "
                "as in https://chat.example.org, or * for any"
            )
        origins.add(origin.removesuffix(DEFAULT_PORTS.get(origin.partition(":")[0], "")))
    return frozenset(origins)


def _check_origins(text: str) -> None:
    """Raise ValueError for an origin that no browser sends."""
    read_origins(text)


class Type(click.ParamType):  # type: ignore[type-arg]
    """Text without restrictions; a subclass overrides what it restricts."""

    name = "TEXT"  # stands for the value in --help
    bounds = ""
    wanted = "text"
    known: Sequence[str] = ()

    def parse(self, value: Any) -> Any:
        """Return the value of a text, or a value itself; ValueError if it is invalid."""
        return value

    def explain(self, value: Any, error: Exception) -> str:
        """Return the value and the remedy, as the rest of a sentence that begins with the option's name."""
        return f" is {value!r}.{nearest(str(value), self.known)} Use {self.wanted}"

    def read(self, value: Any, name: str) -> Any:
        """Return the value of the option called `name`; UsageError if it is invalid."""
        try:
            return self.parse(value)
        except (ValueError, OverflowError) as error:
            if gone := removed(f"{name} {value}"):
                raise UsageError(gone) from None
            raise UsageError(f"{name}{self.explain(value, error)}") from None

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return self.read(value, param.written(ctx)) if isinstance(value, str) else value  # a default

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


class Number(Type):
    """A finite number from `low` to `high`; `above`: greater than `low`."""

    def __init__(
        self, low: float, high: float = math.inf, kind: type = int, *, above: bool = False, name: str = "N"
    ) -> None:
        self.low, self.high, self.kind, self.above, self.name = low, high, kind, above, name
        bound = f"above {low:,}" if above else f"of at least {low:,}"
        self.bounds = f">{low}" if above else f"{low}.."
        if high < math.inf:
            bound, self.bounds = f"from {low:,} to {high:,}", f"{low}..{high}"
        self.wanted = f"{'a whole number' if kind is int else 'a number'} {bound}"

    def parse(self, value: Any) -> Any:
        number = self.kind(value)
        if not (self.low <= number <= self.high) or math.isinf(number) or (self.above and number == self.low):
            raise ValueError
        return number


class Size(Number):
    """A number of bytes, such as 512M or 1.5GiB."""

    def __init__(self) -> None:
        super().__init__(0, name="SIZE")
        self.wanted = "a size of at least 0, such as 512M"

    def parse(self, value: Any) -> Any:
        digits = str(value).upper().removesuffix("B").removesuffix("I")
        unit = digits[-1:] if digits[-1:] in UNITS else ""
        return super().parse(float(digits.removesuffix(unit)) * UNITS[unit])


class Choice(Type):
    """One of some texts."""

    def __init__(self, known: Iterable[str], name: str = "") -> None:
        self.known = tuple(known)
        self.name = name or "|".join(self.known)
        self.wanted = f"one of: {', '.join(self.known)}"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(text) for text in self.known if text.startswith(incomplete)]

    def parse(self, value: Any) -> Any:
        if value not in self.known:
            raise ValueError
        return value


class OnOff(Type):
    """A switch that is a word, so that a flag can turn off what the environment turns on.

    With `alone` the flag may stand without a word, and means on.
    """

    name = "on|off"
    wanted = "on or off"

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone

    def parse(self, value: Any) -> Any:
        if str(value).lower() not in SWITCH:
            raise ValueError
        return SWITCH[str(value).lower()]


class Read(Type):
    """Text that a function reads or only checks; the text of its ValueError names the value and the remedy."""

    def __init__(self, read: Callable[[str], Any], name: str = "TEXT") -> None:
        self._read, self.name = read, name

    def parse(self, value: Any) -> Any:
        result = self._read(value)
        return value if result is None else result

    def explain(self, value: Any, error: Exception) -> str:
        return f": {error}"


def _check_key(text: str) -> None:
    if not (text.isascii() and text.isprintable()):
        raise ValueError("the key has characters that are not allowed in an HTTP header. Use printable ASCII")


def is_local(host: str) -> bool:
    """Return whether only programs of this machine can reach a server at this address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def trusted_names(host: str, names: list[str]) -> list[str] | None:
    """Return the names by which clients may call a server at this address: these and local ones, or None for any."""
    local = [host, "localhost", ".localhost", "127.0.0.1", "[::1]"]  # which no page of another site has
    return [name.lower() for name in names] + local if names or is_local(host) else None


def address(host: str, port: int) -> str:
    """Return host and port as in a URL, in which an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_host(text: str) -> str:
    """Return an address to listen on, without the brackets that an IPv6 address has in a URL."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        if host != text or ":" in host:
            ipaddress.IPv6Address(host)
        elif not HOST_NAME.fullmatch(host):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is neither an IP address nor a host name. Use one without scheme and port, such as 127.0.0.1, "
            "::1 or localhost"
        ) from None
    return host


TEXT = Type()
HOST = Read(_read_host, "HOST")
KEY = Read(_check_key, "KEY")
ORIGINS = Read(_check_origins)
FILE = Read(Path, "FILE")
FOLDER = Read(Path, "DIR")
POSITIVE = Number(0, kind=float, above=True)

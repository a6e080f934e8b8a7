"""Options of a policy: a default, bounds and one line of help, declared as attributes of its class.

`delay: float = option(0.0, "seconds that ...", low=0.0)` in a class gives each of its objects a `delay`, which is
parsed from text, checked against its bounds, and listed by `describe`. The type of the default is the type of the
option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

T = TypeVar("T")
MOST = 1 << 60  # largest size of a number: products and quotients of a few such numbers are still finite
MOST_CHARACTERS = 10_000  # of a text, or of the parts of a tuple together
MOST_PARTS = 1000  # of a tuple
LONGEST_WAIT = 3600.0  # seconds that a policy may let requests wait for others, since they are to be answered
LONGEST_NAME = 100  # of an option or policy that a similar name is searched for


class OptionError(ValueError):
    """An option that does not exist, or a value outside its bounds."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a number from low to high, one of `choices`, or a tuple of such, separated by commas.

    The parts of a tuple are of the type of its default's first part, or whole numbers.
    """

    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def bounds(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            return " or ".join(self.choices) + ", separated by commas" * isinstance(self.default, tuple)
        if isinstance(self.default, bool):
            return "on or off"
        if isinstance(self.default, str):
            return "text"
        kind = "numbers separated by commas, each " if isinstance(self.default, tuple) else ""
        ends = [f"at least {self.low:g}"] if self.low is not None else []
        ends += [f"at most {self.high:g}"] if self.high is not None else []
        return (kind + " and ".join(ends)) or "any number"

    def read(self, name: str, value: object) -> Any:
        """Return `value`, which may be text, as the option's type; raise OptionError if it is not allowed."""
        try:
            parsed = self._parse(value)
        except (TypeError, ValueError, OverflowError):
            parsed = None
        parts = parsed if isinstance(parsed, tuple) else (parsed,)
        if parsed is None or not all(self._is_allowed(part) for part in parts):
            default = ("off", "on")[self.default] if isinstance(self.default, bool) else repr(self.default)
            raise OptionError(
                f"policy option {name} is {shown(value)}, but must be {self.bounds}{self._limit} ({self.help}). "
                f"Leave it out for the default {default}"
            )
        return parsed

    @property
    def _limit(self) -> str:
        """What holds for all options of this type, in words."""
        if self.choices or isinstance(self.default, bool):
            return ""
        if isinstance(self.default, str):
            return f" of at most {MOST_CHARACTERS:,} characters"
        size = ", finite and at most 2^60 in size" if self.high is None else ""
        return size + (f", at most {MOST_PARTS:,} of them" if isinstance(self.default, tuple) else "")

    def _parse(self, value: object) -> Any:
        """Return `value` as the option's type, None if it is not allowed; raise what the conversion raises."""
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            return None
        if isinstance(self.default, bool):
            words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
            return words.get(str(value).lower()) if isinstance(value, str | int | float) else None
        if isinstance(self.default, tuple):
            parts = _parts(value)
            kind = type(self.default[0]) if self.default else int
            return tuple(_converted(kind, part) for part in parts if part != "") if len(parts) <= MOST_PARTS else None
        return _converted(type(self.default), value)

    def _is_allowed(self, value: Any) -> bool:
        if isinstance(value, str):
            return len(value) <= MOST_CHARACTERS and (not self.choices or value in self.choices)
        low, high = -MOST if self.low is None else self.low, MOST if self.high is None else self.high
        return bool(low <= value <= high)  # False for nan


def _parts(value: object) -> list[object] | tuple[object, ...]:
    if isinstance(value, list | tuple):
        return value
    return [*value.split(",")] if isinstance(value, str) else [value]


def _converted(kind: type, value: object) -> Any:
    """Return `value` as a number or text; raise ValueError if it is something else, or would lose its fraction."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str) and (kind is str or not is_number):
        raise ValueError
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    return kind(value)


def shown(value: object) -> str:
    """Return the beginning of a value's repr, for an error."""
    short = Repr()
    short.maxstring = short.maxother = 60
    try:
        return short.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of too many digits"


def option(
    default: T, help: str, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()
) -> T:
    """Declare an option of a policy, as a class attribute."""
    return Option(default, help, low, high, choices)  # type: ignore[return-value]


def options_of(cls: type) -> dict[str, Option]:
    """Return the options that a class and its bases declare, those of the bases first."""
    options: dict[str, Option] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Option):
                options[name] = value
            elif name in options:  # a class that sets a fixed value removes the option
                del options[name]
    return options


def values_of(target: object) -> dict[str, Any]:
    """Return the options of `target` with their values."""
    return {name: getattr(target, name) for name in options_of(type(target))}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the known name closest to `name`, or "" if none is close."""
    near = get_close_matches(name, list(known), 1) if len(name) <= LONGEST_NAME else []
    return f" Did you mean {near[0]!r}?" if near else ""


def set_options(target: object, given: Mapping[str, object]) -> None:
    """Set all options of `target`: the given ones, checked, and the defaults of the others."""
    known = options_of(type(target))
    for name in given:
        if name not in known:
            guess = nearest(name, known)
            owner, order = getattr(target, "name", type(target).__name__), getattr(target, "order_name", "")
            owner += f"+{order}" if order else ""
            has = f"Use one of: {', '.join(known)}" if known else "It has no options. Remove it"
            raise OptionError(f"policy {owner} has no option {shown(name)}.{guess} {has}")
    for name, item in known.items():
        setattr(target, name, item.read(name, given[name]) if name in given else item.default)

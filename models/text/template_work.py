"""What the rendering of a chat template costs: counted before each operation that works through its input.

A template has bounded steps, but each can call C code that works through megabytes and that nothing can interrupt. So
every such operation counts its input, as large as it is written out: a list that holds a text a thousand times counts it
a thousand times. This module must not know Jinja2's syntax, nor what is rendered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

MOST_STEPS = 20_000  # iterations and calls of macros in one rendering
MOST_TEXT = 4 << 20  # characters that one operation makes
MOST_ITEMS = 1 << 20  # of a list that one operation makes
MOST_MADE = 64 << 20  # characters that all operations of one rendering make
MOST_WORK = 256 << 20  # characters that all operations of one rendering work through
MOST_SECONDS = 5.0  # for one rendering; none of the operations that are allowed takes more than a part of a second
MOST_NUMBER = 1 << 20  # for counts
MOST_WIDTH = 1000
LOOK_EVERY = 1 << 16  # characters
ITEM = 16  # characters that an item of a list counts for
LONG_NEEDLE = 128  # characters, from which on CPython searches forward in linear time
SHORT_TEXT = 30_000  # characters, up to which it may not
SEARCHES_BACK = {"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip", "trim"}


class TooMuch(TemplateRuntimeError):
    """A template computes more than it may."""


class Budget:
    """What one rendering has left."""

    __slots__ = ("deadline", "look_at", "made", "steps", "work")

    def __init__(self) -> None:
        self.steps, self.work, self.made = MOST_STEPS, MOST_WORK, MOST_MADE
        self.look_at = MOST_WORK  # the work that is left when the clock is read again
        self.deadline = time.monotonic() + MOST_SECONDS


budget: ContextVar[Budget] = ContextVar("budget")


def step(written: int) -> None:
    """Count a step of the rendering, which writes so many characters of the template's own."""
    left = budget.get()
    left.steps -= 1
    if left.steps < 0:
        raise TooMuch(f"it takes more than {MOST_STEPS:,} steps")
    left.made -= written
    spend(written)


def spend(work: float) -> None:
    """Count work, in characters, before it is done."""
    left = budget.get()
    left.work -= ITEM + (int(work) if work < MOST_WORK else MOST_WORK)
    if left.work < left.look_at:
        _look(left)


def _look(left: Budget) -> None:
    """Raise TooMuch if nothing is left."""
    left.look_at = left.work - LOOK_EVERY
    if left.work < 0:
        raise TooMuch(f"it works through more than {MOST_WORK:,} characters")
    if left.made < 0:
        raise TooMuch(f"it makes more than {MOST_MADE:,} characters")
    if time.monotonic() > left.deadline:
        raise TooMuch(f"it takes more than {MOST_SECONDS:g} s")


def made(value: Any) -> Any:
    """Return what an operation has made, after counting it. An iterator counts while it is used."""
    if isinstance(value, str):
        _count(len(value), MOST_TEXT, 1)
    elif isinstance(value, list | tuple | dict):
        _count(len(value), MOST_ITEMS, ITEM)
    elif isinstance(value, int):
        if value.bit_length() > 1024:
            raise TooMuch("it computes with too large a number")
    elif isinstance(value, bytes):
        raise TooMuch("it makes bytes")
    elif isinstance(value, Iterator):
        return _counted(value)
    return value


def _count(length: int, most: int, each: int) -> None:
    if length > most:
        raise too_long()
    budget.get().made -= length * each
    spend(length)


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        spend(ITEM)
        yield made(value) if isinstance(value, list | tuple) else value


def used(value: Any) -> Any:
    """Return an argument, an iterator as a list: C code that uses it would not stop at its end."""
    if not isinstance(value, Iterator):
        return value
    found: list[Any] = []
    for item in value:
        spend(ITEM)
        if len(found) == MOST_ITEMS:
            raise too_long()
        found.append(item)
    return found


def shallow(value: Any) -> int:
    """Return the size of a text, or of a collection without its items."""
    if isinstance(value, str):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple | dict | range) else 1


def size(value: Any) -> float:
    """Return about as many characters as a value has when it is written out."""
    return len(value) if isinstance(value, str) else _size(value, {})


def _size(value: Any, known: dict[int, float]) -> float:
    if isinstance(value, str):
        return len(value) + ITEM
    children: Any
    if isinstance(value, Mapping):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, Namespace):
        children = object.__getattribute__(value, "_Namespace__attrs").values()
    elif isinstance(value, list | tuple | KeysView | ItemsView | ValuesView | set | frozenset):
        children = value
    else:
        return ITEM * len(value) if isinstance(value, range) else ITEM
    found = known.get(id(value))
    if found is None:  # each is looked at once, but counts wherever it is
        known[id(value)] = ITEM  # where a collection holds itself
        found = known[id(value)] = ITEM + sum(_size(child, known) for child in children)
    return found


def writes(value: Any, most: float = MOST_TEXT) -> None:
    """Count a value that becomes a text; raise TooMuch if that has more than `most` characters."""
    length = size(value)
    if length > most:
        raise too_long()
    spend(length)


def searches(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Count the search for a text in another: backward, CPython compares each place with the whole."""
    needle = max((len(arg) for arg in args if isinstance(arg, str)), default=1) or 1
    if name not in SEARCHES_BACK and len(text) > SHORT_TEXT:
        needle = min(needle, LONG_NEEDLE)
    spend(len(text) * needle)


def replaces(text: str, old: Any, new: Any, *_: Any) -> None:
    """Count a replacement; raise TooMuch if the text would be too long."""
    old, new = str(old), str(new)
    if len(text) + (text.count(old) if len(text) * len(old) < MOST_WORK else 0) * len(new) > MOST_TEXT:
        raise too_long()


def joins(separator: str, items: Any) -> None:
    """Count the texts that are joined."""
    if isinstance(items, list | tuple | dict | str):
        writes(items)
        if len(items) * len(separator) > MOST_TEXT:
            raise too_long()


def too_long() -> TooMuch:
    return TooMuch(
        f"it makes a text of more than {MOST_TEXT:,} characters, or a list of more than {MOST_ITEMS:,} items"
    )


def counted(function: Any, is_deep: bool, check: Callable[..., None] | None) -> Any:
    """Return a filter or test that counts its arguments and its result; `check` may refuse the arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(used, args))
        for value in (*args, *kwargs.values()):
            spend(size(value) if is_deep else shallow(value))
        if check is not None:
            check(*args, **kwargs)
        return made(function(*args, **kwargs))

    for mark in ("jinja_pass_arg", "__name__"):  # how Jinja2 marks filters that want their context
        if hasattr(function, mark):
            setattr(call, mark, getattr(function, mark))
    return call

"""Takes the text of an answer apart as it grows: reasoning, content, and tool calls with their arguments.

A grammar has fixed the form of calls, so nothing is parsed: the words around a call are known, and its arguments end with
the bracket that closes them. However the text is cut, the pieces of a part join to the same string. This module must not
know the wire format of answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

Kind = Literal["reasoning", "content", "call", "arguments"]


class Piece(NamedTuple):
    """A piece of a part. A "call" has the tool's name as text, and an id; its arguments follow in pieces of their own."""

    kind: Kind
    text: str
    call: int = 0  # its place among the calls
    id: str = ""


class AnswerParts:
    """Takes one answer apart: `feed` it as it grows.

    `form` is how the model writes calls (`models/text/tool_format.py`) and `names` are the tools that it may call; without
    names, what looks like a call is text. Where a call is `required`, there is no text before it. `thinking` is "maybe", "open"
    where the answer begins as thought, or "none". What precedes a call or follows the thinking part loses the white space beside it. Half a call's head is left out.
    """

    def __init__(self, form: Any, names: Collection[str], thinking: str, *, required: bool = False) -> None:
        self._form, self._required = form, required
        self._open, self._close = form.thinking_tags
        self._heads = {name + form.middle: name for name in names}
        self._held = ""
        self._step = {"none": self._content, "maybe": self._start, "open": self._reasoning}[thinking]
        self._strips = thinking == "open"  # white space at the beginning of the part
        self._index = -1
        self._depth, self._quoted, self._escaped = 0, False, False  # within the arguments
        self._pieces: list[Piece] = []

    @property
    def has_called(self) -> bool:
        """Whether it has whole calls alone behind its text."""
        return self._step == self._behind

    @property
    def in_call(self) -> bool:
        """Whether the arguments of the last call have not ended."""
        return self._step == self._arguments

    def feed(self, text: str, ended: bool = False) -> list[Piece]:
        """Return what became certain with more text: all of it, if the answer has `ended`."""
        self._held += text
        while self._advance():
            pass
        if ended:
            self._finish()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _finish(self) -> None:
        held, marker = self._held, self._form.marker
        has_begun_call = self._required or (self._heads and marker and held.lstrip().startswith(marker))
        if self._step == self._reasoning:
            self._add("reasoning", held)
        elif self._step in (self._start, self._content) and not has_begun_call:
            self._add("content", held)
        self._held = ""

    def _advance(self) -> bool:
        """Go on, and return whether there is more to do with the text at hand."""
        if self._strips:
            self._held = self._held.lstrip()
            self._strips = not self._held
        return bool(self._held) and self._step()

    def _go(self, step: Callable[[], bool], skip: int = 0, *, strips: bool = False) -> bool:
        """Go on with another step, behind the next `skip` characters."""
        self._held, self._step, self._strips = self._held[skip:], step, strips
        return True

    def _add(self, kind: Kind, text: str, id: str = "") -> None:
        if text:
            self._pieces.append(Piece(kind, text, max(0, self._index), id))

    def _until(self, kind: Kind, word: str) -> bool:
        """Add the text before a word, and return whether that has come; hold back what may belong to it."""
        before, found, rest = self._held.partition(word)
        if not found:
            possible = range(min(len(word) - 1, len(before)), 0, -1)
            before = before[: len(before) - next((n for n in possible if before.endswith(word[:n])), 0)]
        shown = before.rstrip()
        self._add(kind, shown)
        self._held = rest if found else self._held[len(shown) :]
        return bool(found)

    def _start(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._open):
            return self._go(self._reasoning, self._held.index(self._open) + len(self._open), strips=True)
        return not self._open.startswith(text) and self._go(self._content)

    def _reasoning(self) -> bool:
        return self._until("reasoning", self._close) and self._go(self._content, strips=True)

    def _content(self) -> bool:
        opening = self._form.opening
        if self._heads and self._form.marker:
            return self._until("content", opening) and self._go(self._head)
        if self._heads and self._held.startswith(opening):
            return self._go(self._head, len(opening))
        return not (self._heads and opening.startswith(self._held)) and self._go(self._plain)

    def _plain(self) -> bool:
        self._add("content", self._held)
        self._held = ""
        return False

    def _head(self) -> bool:
        for head, name in self._heads.items():
            if self._held.startswith(head):
                self._index += 1
                self._add("call", name, f"call_{secrets.token_hex(12)}")
                return self._go(self._arguments, len(head))
        if any(head.startswith(self._held) for head in self._heads):
            return False
        self._held = self._form.opening + self._held  # it only looked like a call
        return self._go(self._plain)

    def _arguments(self) -> bool:
        for i, c in enumerate(self._held, 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = c == "\\", c != '"'
            elif c == '"':
                self._quoted = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if not self._depth:
                    self._add("arguments", self._held[:i])
                    return self._go(self._behind, i)
        self._add("arguments", self._held)
        self._held = ""
        return False

    def _behind(self) -> bool:
        again = self._form.tail + self._form.between + self._form.head
        return self._held.startswith(again) and self._go(self._head, len(again))

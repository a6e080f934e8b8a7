"""Takes the text of an answer apart as it grows: reasoning, content, and tool calls with their arguments.

A grammar has fixed the form of calls, so nothing is parsed: the words around a call are known, and its arguments end with
the bracket that closes them. However the text is cut, the pieces of a part join to the same string. This module must not
know the wire format of answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

OPEN, CLOSE = "<think>", "</think>"
Kind = Literal["reasoning", "content", "call", "arguments"]


class Piece(NamedTuple):
    """A piece of a part. A "call" has the tool's name as text, and an id; its arguments follow in pieces of their own."""

    kind: Kind
    text: str
    call: int = 0  # its place among the calls
    id: str = ""


class AnswerParts:
    """Takes one answer apart: `feed` it as it grows, then `finish` it.

    `form` is how the model writes calls (`models/text/tool_format.py`) and `names` are the tools that it may call; without
    names, what looks like a call is text. `thinking` is "maybe", "open" where the answer begins as thought, or "none".
    What precedes a call or follows the thinking part loses the white space beside it. Half a call's head is left out.
    """

    def __init__(self, form: Any, names: Collection[str], thinking: str) -> None:
        self._form = form
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

    def feed(self, text: str) -> list[Piece]:
        """Return what became certain with more text."""
        self._held += text
        while self._advance():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return the rest."""
        held, self._held = self._held, ""
        if self._step == self._reasoning:
            self._add("reasoning", held)
        elif self._step in (self._start, self._content) and not (self._heads and self._has_marker(held)):
            self._add("content", held)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _advance(self) -> bool:
        """Go on, and return whether there is more to do with the text at hand."""
        if self._strips:
            self._held = self._held.lstrip()
            self._strips = not self._held
        return bool(self._held) and self._step()

    def _add(self, kind: Kind, text: str, id: str = "") -> None:
        if text or id:
            self._pieces.append(Piece(kind, text, max(0, self._index), id))

    def _has_marker(self, held: str) -> bool:
        marker = self._form.marker
        return bool(marker) and held.lstrip().startswith(marker)

    def _start(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._strips, self._step = text[len(OPEN) :], True, self._reasoning
            return True
        if OPEN.startswith(text):
            return False
        self._step = self._content
        return True

    def _reasoning(self) -> bool:
        if self._until("reasoning", CLOSE):
            self._strips, self._step = True, self._content
            return True
        return False

    def _until(self, kind: Kind, word: str) -> bool:
        """Add the text before a word, and return whether that has come; hold back what may belong to it."""
        before, found, rest = self._held.partition(word)
        if not found:
            possible = range(min(len(word) - 1, len(before)), 0, -1)
            before = before[: len(before) - next((n for n in possible if before.endswith(word[:n])), 0)]
            rest = self._held[len(before) :]
        shown = before.rstrip()
        self._add(kind, shown)
        self._held = rest if found else self._held[len(shown) :]
        return bool(found)

    def _content(self) -> bool:
        opening = self._form.opening
        if not self._heads:
            self._step = self._plain
        elif self._form.marker:
            if self._until("content", opening):
                self._step = self._head
                return True
            return False
        elif self._held.startswith(opening):
            self._held, self._step = self._held[len(opening) :], self._head
        elif opening.startswith(self._held):
            return False
        else:
            self._step = self._plain
        return True

    def _plain(self) -> bool:
        self._add("content", self._held)
        self._held = ""
        return False

    def _head(self) -> bool:
        head = next((head for head in self._heads if self._held.startswith(head)), None)
        if head is not None:
            self._index += 1
            self._add("call", self._heads[head], f"call_{secrets.token_hex(12)}")
            self._held, self._step = self._held[len(head) :], self._arguments
            return True
        if any(head.startswith(self._held) for head in self._heads):
            return False
        self._held, self._step = self._form.opening + self._held, self._plain  # it only looked like a call
        return True

    def _arguments(self) -> bool:
        for i, c in enumerate(self._held):
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
                    self._add("arguments", self._held[: i + 1])
                    self._held, self._step = self._held[i + 1 :], self._behind
                    return True
        self._add("arguments", self._held)
        self._held = ""
        return False

    def _behind(self) -> bool:
        again = self._form.tail + self._form.between + self._form.head
        if self._held.startswith(again):
            self._held, self._step = self._held[len(again) :], self._head
            return True
        return False

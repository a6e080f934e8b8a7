"""Output of commands: text for people on stderr, text for programs on stdout, and how a command exits."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from .options import UsageError

FINE, SOME_FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = [
    (f"{FINE}", "success"), (f"{SOME_FAILED}", "some requests failed or were not sent"), (f"{USAGE}", "usage error"),
    (f"{UNREACHABLE}", "server unreachable"),
]  # fmt: skip


def say(console: Console, text: str) -> None:
    """Print a line for humans, wrapped between words on a terminal; brackets are not markup."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=not console.is_terminal)


class FittedTable(Table):
    """A table that gives up its lines, and then its margins, before it breaks a cell or a word on a narrow terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._spare(console, options) < 0:
            self._fit(console, options)
        yield from super().__rich_console__(console, options)

    def _fit(self, console: Console, options: ConsoleOptions) -> None:
        """Choose the widths of the columns: whole cells in some style if that is possible, and whole words otherwise."""
        lined = (self.box, self.show_edge, self.padding)
        plain, tight = ((box.SIMPLE_HEAD, False, (0, margin, 0, 0)) for margin in (1, 0))
        heads = [_longest_word(column.header) for column in self.columns]
        cells = [[*map(str, column.cells)] for column in self.columns]
        whole = [max([head, *map(cell_len, texts)]) for head, texts in zip(heads, cells)]
        words = [max([head, *map(_longest_word, texts)]) for head, texts in zip(heads, cells)]
        for widths, style in ((whole, lined), (whole, plain), (words, lined), (words, plain), (words, tight)):
            self.box, self.show_edge, self.padding = style
            for column, width in zip(self.columns, widths):
                column.width = width
            spare = self._spare(console, options)
            if spare >= 0:
                self._widen(whole, spare)
                self._widen([cell_len(str(column.header)) for column in self.columns], self._spare(console, options))
                return
        widest = max(self.columns, key=lambda column: column.width or 0)
        widest.width = max(1, (widest.width or 0) + spare)

    def _spare(self, console: Console, options: ConsoleOptions) -> int:
        """Return how many more characters a line has; negative if it has too few."""
        return options.max_width - console.measure(self, options=options.update(width=10_000)).maximum

    def _widen(self, wanted: Sequence[int], spare: int) -> None:
        """Give each spare character to the column that lacks most."""
        lacks = [most - (column.width or 0) for most, column in zip(wanted, self.columns)]
        while spare and (most := max(lacks)) > 0:
            place = lacks.index(most)
            self.columns[place].width = (self.columns[place].width or 0) + 1
            lacks[place], spare = most - 1, spare - 1


def _longest_word(text: object) -> int:
    return max(map(cell_len, str(text).split()), default=0)


def table_of(
    title: str | None, heads: Iterable[str], rows: Iterable[Iterable[RenderableType]], left: int = 1,
    words: Sequence[str] = (), no_wrap: bool = False, **style: Any,
) -> Table:  # fmt: skip
    """Return a table: its first `left` columns and those headed by `words` are words, the others numbers.

    What is too long is wrapped; with `no_wrap` only words are.
    """
    result = FittedTable(title=title, **style)
    for place, head in enumerate(heads):
        is_word = place < left or head in words
        justify: Literal["left", "right"] = "left" if is_word else "right"
        result.add_column(head, justify=justify, overflow="fold", no_wrap=no_wrap and not is_word)
    for row in rows:
        result.add_row(*row)
    return result


def emit(text: str, end: str = "\n") -> None:
    """Print a line for machines; characters that the terminal cannot encode are replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    # A reader such as `head` may have closed the pipe.
    with contextlib.suppress(BrokenPipeError):
        print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def emit_json(value: Any, always: bool = False) -> None:
    """Print a value as one line of JSON; on a terminal, where it is unreadable, only if `always`."""
    if always or not sys.stdout.isatty():
        emit(json.dumps(value))


def leave(code: int) -> NoReturn:
    """Exit; after Ctrl-C at once, without finalization, because threads are still running."""
    if code != INTERRUPTED:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code)


def writable(path: Path, flag: str) -> None:
    """Raise UsageError if a file cannot be written; make none."""
    is_new = not os.path.lexists(path)
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror}. Use another {flag} file") from error

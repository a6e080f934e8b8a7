"""What a command owes its shell: no complaint about a closed pipe, and completion.

This module must not know any particular command.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

import click
from click.shell_completion import shell_complete


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Print what the block prints, and end the process quietly if the reader, such as `head`, has left."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        raise SystemExit(0) from None


def complete(command: click.Command, variable: str, environ: Mapping[str, str]) -> None:
    """Answer a shell that completes the command, and end the process, if the variable says so."""
    if environ.get(variable):
        name = str(command.name).rpartition("/")[2]
        with printing():
            raise SystemExit(shell_complete(command, {"obj": {}}, name, variable, environ[variable]))

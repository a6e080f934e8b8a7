"""A command and its shell: no complaint about a closed pipe, completion, the name it was called by, and `ulimit -n`.

This module must not know any particular command.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping

import click
from click.shell_completion import shell_complete

# "OLD=NEW" where ./eb started this command: the name NEW that the user typed for the command OLD. Not for its children.
_OLD, _, _NEW = os.environ.pop("_EB_CALLED", "").partition("=")


def as_called(text: str) -> str:
    """Return a help or a name with the command as the user called it."""
    return re.sub(rf"(?<![\w/])(?:python3 )?{re.escape(_OLD)}(?!\w)", _NEW, text) if _OLD else text


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


def open_files(needed: int) -> int:
    """Raise this process's limit on open files to what is needed, as far as that is allowed; return how many it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed

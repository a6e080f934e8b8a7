"""Answers a shell that completes a command line of `./eb`; the script calls it when `_EB_COMPLETE` is set.

Only the command that is being completed is imported, because this runs at every press of the Tab key. This module must
not know any option: it takes them from the commands.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import click
from click.shell_completion import CompletionItem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from terminal.shell import complete


class Group(click.Group):
    """A command that begins with the name of another; each is made when it is needed."""

    def __init__(self, name: str, makers: Mapping[str, Callable[[], click.Command]]) -> None:
        super().__init__(name)
        self._makers = makers

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._makers)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        make = self._makers.get(cmd_name)
        try:
            return make() if make else None
        except ImportError:  # what it needs is not installed before its first use
            return None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._makers if name.startswith(incomplete)]


def serve() -> click.Command:
    import config
    import policies
    from models.sources import catalog

    return config.command(dict.fromkeys([*policies.names(), *catalog.NAMES], ""))


def made_by(module: str) -> Callable[[], click.Command]:
    """Return a function that makes the command of a module, or takes it from there."""

    def make() -> click.Command:
        found = importlib.import_module(module)
        command: click.Command = found.COMMAND if hasattr(found, "COMMAND") else found.build_command()
        return command

    return make


def simulate() -> click.Command:
    import simulate.__main__ as simulator

    return Group("simulate", {name: partial(simulated, name) for name in simulator.COMMANDS.keys() - simulator.OF_EB})


def simulated(name: str) -> click.Command:
    import simulate.__main__ as simulator

    return simulator.build_command(name)


COMMANDS: dict[str, Callable[[], click.Command]] = {
    "serve": serve, "fleet": made_by("fleet.options"), "queue": made_by("integrations.queue.options"), "load": made_by("client.client"),
    **{name: made_by(f"client.{name}") for name in ("chat", "batch", "compare", "sweep", "switch", "top")},
    "simulate": simulate, **{name: partial(simulated, name) for name in ("probe", "fit", "advise", "new", "try")}, "doctor": serve,
    "help": lambda: click.Command("help", params=[click.Argument(["command"], type=click.Choice(list(COMMANDS)))]),
}  # fmt: skip


if __name__ == "__main__":
    complete(Group("eb", COMMANDS), "_EB_COMPLETE", os.environ)

"""The report of `try`: runs with lower bounds and plots, and the arena. It loads what the verdict in seconds does without."""

from __future__ import annotations

import os
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from client import ending
from simulate.arena.arena import REFERENCE
from simulate.commands import arena
from simulate.commands import run as run_command
from simulate.commands.try_out import printed
from terminal.console import say
from terminal.options import Command, read

ARENA = ["--only", "--seeds", "1", "--num", "200", "--jobs", "1"]


def report(line: list[str], folder: Path, console: Console) -> dict[str, Any]:
    """Run both policies, which begin this line of `simulate run`, draw the page and rank them; return what was found."""
    told = {"runs": run_both(line, folder, console)}
    others = (name for name in dict.fromkeys(line[:2]) if name != REFERENCE)
    given = read(Command("./eb simulate arena", "", arena.options()), [*others, *ARENA])
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        told["arena"] = arena.run(given, Console(stderr=True, force_terminal=False))["ranking"]
    page = folder / "report.html"
    return told | ({"report": str(page)} if page.is_file() else {})


def run_both(line: list[str], folder: Path, console: Console) -> list[dict[str, Any]]:
    """Run `simulate run`, whose report is for this folder; return the result of each policy."""
    given = read(Command("./eb simulate run", "", run_command.options()), [*line, "--out", str(folder), "--no-plots"])
    given.command_line = shlex.join(["./eb", "simulate", "run", *line])
    with printed(folder / "printed.txt", console):
        runs: list[dict[str, Any]] = run_command.run(given, console)["runs"]
    say(console, "drawing the plots of the report")
    ending.draw_page(folder, console)
    return runs

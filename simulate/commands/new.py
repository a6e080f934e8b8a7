"""Write a policy file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

import policies
from simulate.commands.arguments import Sections
from terminal.console import say
from terminal.options import FILE, Argument, UsageError, Values

TEMPLATE = Path(policies.__file__).with_name("template.txt")


def options() -> Sections:
    """Return the options in sections of the help."""
    return {"arguments": [Argument("file", "file to write, such as mine.py", FILE, required=True)]}


def run(args: Values, console: Console) -> dict[str, Any]:
    """Write the file; UsageError if it exists."""
    path: Path = args.file
    if path.suffix != ".py":
        raise UsageError(f"{str(path)!r} is no name of a policy file, which ends in .py. Use {path.with_suffix('.py')}")
    if path.stem.replace("_", "-") in {*policies.names(), *policies.order_names()}:
        raise UsageError(f"{path.stem!r} is the name of a policy of this project. Use another, such as my_{path.name}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text("utf-8"))
    except FileExistsError:
        raise UsageError(f"{str(path)!r} exists, and is not overwritten. Use another name") from None
    say(console, f"written: {path}. Change it, then run ./eb try {path}")
    return {"written": str(path)}

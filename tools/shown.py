"""Writes what commands print below them in the pages whose figures come from the simulator.

usage: python -m tools.shown
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import NamedTuple
from unittest.mock import patch

from simulate.__main__ import main as simulate

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(^```bash\n(\./eb (?:[^\n]*\\\n)*[^\n]*)\n```\n\n```text\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


class Part(NamedTuple):
    """The width of the terminal, the first printed line that a page shows, and the first one behind it that it does not."""

    columns: int
    begin: str
    end: str


PAGES = {  # a part for each block of text, in order
    "advise.md": (Part(80, " +300 requests", "written"),),
    "programs.md": (Part(80, "policy ", " +simulated"), Part(120, "dynamic: program", " *programs in")),
}


def printed(command: str, part: Part) -> str:
    """Run a command of a page, and return the part of what it prints that the page shows."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    words = [str(ROOT / word) if word.startswith("docs/") else word for word in words]
    err = StringIO()
    width = patch.dict(os.environ, COLUMNS=str(part.columns))
    with TemporaryDirectory() as folder, width, redirect_stdout(StringIO()), redirect_stderr(err):
        simulate(words[1:] if words[0] == "simulate" else [*words, "--advice", f"{folder}/advice.json"])
    lines = [line.rstrip() for line in err.getvalue().splitlines()]
    begin = next(i for i, line in enumerate(lines) if re.match(part.begin, line))
    end = next(i for i in range(begin, len(lines)) if re.match(part.end, lines[i]))
    shown = (line for line in lines[begin:end] if line.strip("─ "))
    return "".join(f"{fill(line, part.columns, subsequent_indent='   ', break_on_hyphens=False)}\n" for line in shown)


def pages() -> dict[Path, tuple[str, str]]:
    """Return the pages, each as it is and as it should be."""
    found = {}
    for name, parts in PAGES.items():
        text = (ROOT / "docs" / name).read_text("utf-8")
        rest = iter(parts)
        whole = BLOCK.sub(lambda match: f"{match[1]}{printed(match[2], next(rest))}{match[4]}", text)  # noqa: B023
        found[ROOT / "docs" / name] = (text, whole)
    return found


if __name__ == "__main__":
    for page, (_, whole) in pages().items():
        page.write_text(whole, encoding="utf-8")

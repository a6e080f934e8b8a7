"""Writes the figures that the lessons of docs/tutorial and other pages show, each by the command above it.

Most commands take too long for every run of the tests. Beside the lessons are therefore digests of what the same commands
print for fewer requests: the tests compute these again, and a simulator that serves other schedules is noticed at once. Of
`advise` the lines themselves are kept: its fit may differ by a little on another machine.
Tables and sentences are written by hand: of a page whose digests change, this program says so.

usage: python -m dev.tools.figures [PAGE ...]     run all commands of these pages (default: all), which takes three minutes
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from simulate.__main__ import main as simulate
from simulate.arena.grade import grade
from terminal.console import USAGE

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "tutorial"
LESSONS = sorted(FOLDER.glob("[1-6]-*.md"))
PAGES = [
    *LESSONS,
    *(DOCS / name for name in ("results/policies.md", "results/simulator.md", "advise.md", "programs.md")),
]
DIGESTS = FOLDER / "figures.json"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAVED = re.compile(r"Save\s+this\s+as\s+`(mine/[\w.]+)`.*?^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\./eb (?:simulate (?!calibrate|validate|.* --trace [^m])|(?=advise docs/))")
FIGURE = re.compile(r"\d[\d,]*\.?\d*")
# What takes another time in each run, and is shown as three dots.
PACE = re.compile(r"[\d,]+ steps in [\d.]+ s, [\d,]+ requests a minute|(?<=results/)\S*\d{8}-\d{6}\S*")
FEW = {"--num": 40, "--cases": 5, "--large-cases": 0, "--train": 100, "--batches": 1, "advise": 24}
OUTPUT = ("--out", "--json")
NOT_SHOWN = re.compile(r"[{\[]|[\d,]+ of [\d,]+ cases tested")  # for programs, and how far a command is


class Shown(NamedTuple):
    """The simulator's arguments in the commands of a block, the lines that the lesson says they print, and the place of these in the page."""

    commands: list[list[str]]
    lines: list[str]
    span: tuple[int, int]


def commands(page: Path) -> Iterator[Shown]:
    """Yield the blocks of commands of a page, with what is shown after each."""
    blocks = list(BLOCK.finditer(page.read_text("utf-8")))
    for block, after in zip(blocks, [*blocks[1:], None]):
        lines = block[2].replace("\\\n", " ").splitlines()
        every = [shlex.split(line[found.end() :]) for line in lines if (found := COMMAND.match(line))]
        if every and block[1] == "bash":
            shown = after if after is not None and after[1] == "text" else None
            yield Shown(every, shown[2].splitlines() if shown else [], shown.span(2) if shown else (0, 0))


def save_files(folder: Path) -> None:
    """Write all files that the lessons ask for."""
    (folder / "mine").mkdir()
    for page in LESSONS:
        for name, text in SAVED.findall(page.read_text("utf-8")):
            (folder / name).write_text(text)


def printed_by(every: list[list[str]]) -> list[str]:
    """Run commands in the current folder; return the lines that they print for people, with dots for the time they took."""
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()) as out:
        for command in every:
            if simulate([str(DOCS.parent / word) if word.startswith("docs/") else word for word in command]) == USAGE:
                raise SystemExit(f"{shlex.join(command)} is refused: {told.getvalue().strip()}")
    lines = (told.getvalue() + out.getvalue()).splitlines()
    return [PACE.sub("...", line).rstrip() for line in lines if not NOT_SHOWN.match(line)]


def shape(line: str) -> str:
    """Return a line without what another figure in it changes."""
    return re.sub(r"[━─]+|[\d.,-]+| +", lambda found: found[0][0] if found[0][0] in "━─ " else "0", line.rstrip())


def is_same(shown: str, printed: str, rel: float = 0.0) -> bool:
    """Whether two lines are equal, but for figures that differ by up to `rel` of their value, and then by up to 1."""
    if not rel or shape(shown) != shape(printed):
        return shown.rstrip() == printed.rstrip()
    pairs = zip(*(FIGURE.findall(line) for line in (shown, printed)), strict=True)
    figures = ([float(figure.replace(",", "")) for figure in pair] for pair in pairs)
    return all(abs(b - a) <= max(1, rel * abs(a)) for a, b in figures)


def refreshed(shown: Shown) -> Iterator[str]:
    """Yield the lines of a page with the figures that its commands print now."""
    printed = iter(printed_by(shown.commands))
    for line in shown.lines:
        found = next((other for other in printed if shape(other) == shape(line)), None)
        if found is None:
            raise SystemExit(f"error: {shlex.join(shown.commands[0])} prints no line like {line!r}. Edit the page")
        yield found


def smaller(command: list[str]) -> list[str]:
    """Return a command with few requests and without pictures; for `advise`, with a log of few in the current folder."""
    if command[0] == "advise":
        log, few = DOCS.parent / command[1], Path(command[1].rpartition("/")[2])
        few.mkdir(exist_ok=True)
        shutil.copy(log / "meta.json", few)
        rows = (log / "requests.jsonl").read_text("utf-8").splitlines(keepends=True)
        (few / "requests.jsonl").write_text("".join(rows[: FEW["advise"]]), "utf-8")
        return ["advise", str(few), "--anyway"]  # so few leave the fit in doubt
    words = [w for w, before in zip(command, ["", *command]) if w not in OUTPUT and before not in OUTPUT]
    fewer = [str(min(FEW[before], int(w))) if before in FEW else w for w, before in zip(words, ["", *words])]
    return [*fewer, *(["--requests", "2"] if "--exhaustive" in words else [])]


@cache
def digest(every: str) -> str | list[str]:
    """Return a digest of what the commands in these lines print for fewer requests: of a grade, without the check of the
    laws; of advice, the lines of its table.
    """
    commands = [shlex.split(line) for line in every.splitlines()]
    if commands[0][0] == "advise":
        return [line for line in printed_by(commands) if line.startswith("│")]
    if commands[0][0] == "grade":
        _, lesson, *policies = commands[0]
        lines = [
            f"{found.figure:.4g} {found.score:.4g}" for found in (grade(p, lesson, cases=1, large=0) for p in policies)
        ]
    else:
        lines = printed_by(commands)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def digests() -> dict[str, list[str | list[str]]]:
    """Return a digest for each block of each page, in a folder with the lessons' files."""
    return {
        page.stem: [digest("\n".join(shlex.join(smaller(c)) for c in shown.commands)) for shown in commands(page)]
        for page in PAGES
    }


def main(names: list[str]) -> None:
    """Replace the figures of the pages, and the digests of all."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        save_files(Path(folder))
        for page in PAGES:
            if not names or page.stem in names:
                text = page.read_text("utf-8")
                for shown in reversed(list(commands(page))):
                    if shown.lines:
                        start, end = shown.span
                        text = text[:start] + "\n".join([*refreshed(shown), ""]) + text[end:]
                page.write_text(text, "utf-8")
        before, now = json.loads(DIGESTS.read_text()), digests()
        DIGESTS.write_text(json.dumps(now, indent=1) + "\n")
    for name in now:
        if before.get(name) != now[name]:
            print(f"{name}: read its sentences and tables again")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    main(sys.argv[1:])

"""Writes docs/results/terminal.md: what the commands show on terminals of 80 and 120 columns, run in tmux.

    python tools/terminal.py

It starts a server on port 8500, sends it a load while `top` watches, compares and simulates. It must not change what the
commands print, apart from blank lines at the end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from client.runs import machine

SERVE = "./eb serve dynamic --model bard --max-batch-size 16"
LOAD = "./eb load --burst --numsamples 300 --seed 1"
TOP = "./eb top"
COMPARE = "./eb compare --quick --seed 1"
SIMULATE = "./eb simulate run nobatch static dynamic --rate 2 --seed 1"
READY, PROMPT = "ready in", "$ "
ENDED = r"\n\$$"
HALF = r"done 1\d\d"
INTRO = """# On a terminal

What the commands show on a terminal, as `python tools/terminal.py` recorded it on {date}
({machine}, which other programs used, too).
Into a pipe they write no color and no bar, progress is a line every five seconds, and the result is JSON.
"""


class Terminal:
    """A tmux session of one window with a shell."""

    def __init__(self, name: str, width: int, height: int) -> None:
        self.name = name
        shell = f"cd {ROOT} && PS1='{PROMPT}' exec bash --norc"
        tmux("new-session", "-d", "-s", name, "-x", str(width), "-y", str(height), shell)

    def type(self, command: str) -> None:
        tmux("send-keys", "-t", self.name, "-l", command)
        tmux("send-keys", "-t", self.name, "Enter")

    def press(self, key: str) -> None:
        tmux("send-keys", "-t", self.name, key)

    def text(self, scrolled: bool = True) -> str:
        """Return what is on the screen, and what was scrolled out of it."""
        lines = tmux("capture-pane", "-p", "-t", self.name, *(["-S", "-"] if scrolled else []))
        return "\n".join(line.rstrip() for line in lines.splitlines()).strip("\n")

    def wait(self, wanted: str, seconds: float = 300) -> None:
        """Wait for a pattern on the last lines; TimeoutError with the screen if it does not come."""
        end = time.monotonic() + seconds
        while not re.search(wanted, self.text()[-600:]):
            if time.monotonic() > end:
                raise TimeoutError(f"no {wanted!r} on the screen:\n{self.text()}")
            time.sleep(0.2)

    def result(self, command: str) -> str:
        """Run a command to its end; return it with what it showed."""
        self.type(f"clear; {command}")
        time.sleep(1)
        self.wait(ENDED)
        return f"$ {command}\n" + self.text().removesuffix(PROMPT.strip()).rstrip()


def tmux(*words: str) -> str:
    return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def terminal(name: str, width: int, height: int = 50) -> Iterator[Terminal]:
    session = Terminal(f"eb-{name}-{width}", width, height)
    try:
        yield session
    finally:
        session.press("C-c")
        time.sleep(2)
        tmux("kill-session", "-t", session.name)


def record(width: int) -> dict[str, str]:
    """Return what each command shows on a terminal of this width."""
    shown: dict[str, str] = {}
    with terminal("server", width) as server, terminal("client", width) as client, terminal("top", width, 28) as top:
        server.type(f"clear; {SERVE}")
        server.wait(READY)
        top.type(TOP)
        client.type(f"clear; {LOAD}")
        client.wait(HALF)
        shown["Server"] = f"$ {SERVE}\n{server.text()}"
        shown["Top"] = f"$ {TOP}\n{top.text(scrolled=False)}"
        client.wait(ENDED)
        shown["Client"] = f"$ {LOAD}\n{client.text().removesuffix(PROMPT.strip()).rstrip()}"
    with terminal("rest", width) as rest:
        shown["Compare"] = rest.result(COMPARE)
        shown["Simulate"] = rest.result(SIMULATE)
    return shown


def main() -> None:
    facts = machine()
    parts = [INTRO.format(machine=f"{facts['processor']} with {facts['cpus']} CPUs", date=date.today().isoformat())]
    for width in (80, 120):
        for name, text in record(width).items():
            if width > 80 and name in ("Client", "Simulate"):  # the same as on 80 columns
                continue
            parts.append(f"## {name}, {width} columns\n\n```\n{text}\n```\n")
    (ROOT / "docs" / "results" / "terminal.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()

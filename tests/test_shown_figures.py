"""The figures of pages are what their commands print; a link to the lab is the same race."""

from __future__ import annotations

import base64
import json
import re
import shlex
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from dev.tools import pack_lab
from simulate.__main__ import main
from simulate.best import regret
from tests.support import ROOT

PAGES = [ROOT / "docs" / "batching.md"]  # `./eb simulate papers` writes the page on papers
# A block of commands, a table with a row for each of their runs, and perhaps a link to the lab.
SHOWN = re.compile(
    r"^```bash\n((?:\./eb simulate run .*\n(?: .*\n)*)+)```\n\n((?:\|.*\n)+)(?:\n\[[^]]*\]\(\S+/lab/#([\w-]+)\))?",
    re.MULTILINE,
)
LOADS = {name: drawn[:2] for name, drawn in pack_lab.WORKLOADS.items()}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "loop": lambda run: f"`{run['policy']}`",
    "tokens/s": lambda run: number(run["output_throughput"]),
    "mean E2E, ms": lambda run: number(run["mean_e2el_ms"]),
    "p99 E2E, ms": lambda run: number(run["p99_e2el_ms"]),
    "mean TTFT, ms": lambda run: number(run["mean_ttft_ms"]),
    "p99 ITL, ms": lambda run: number(run["p99_itl_ms"]),
    "mean TTFT of `client-3`, ms": lambda run: number(run["simulation"]["clients"]["client-3"]["mean_ttft_ms"]),
    "deadlines met": lambda run: f"{run['simulation']['deadlines_met']:.1%}".replace("%", " %"),
    "prompt tokens cached": lambda run: f"{run['simulation']['cached']:.0%}".replace("%", " %"),
    "preemptions": lambda run: f"{run['simulation']['preemptions']:,}",
}


class Shown(NamedTuple):
    """Commands, the table after them, and the fragment of a link to the lab."""

    commands: list[list[str]]
    table: list[list[str]]
    fragment: str

    @classmethod
    def of(cls, match: re.Match[str]) -> Shown:
        commands = [shlex.split(line) for line in match[1].replace("\\\n", " ").splitlines()]
        table = [[cell.strip() for cell in row.strip("|").split("|")] for row in match[2].splitlines()]
        return cls(commands, table, match[3] or "")


EVERY = [
    pytest.param(Shown.of(match), id=f"{page.stem}-{k}")
    for page in PAGES
    for k, match in enumerate(SHOWN.finditer(page.read_text("utf-8")))
]


@cache
def runs_of(*command: str) -> list[dict[str, Any]]:
    """Run a command, and return the results of its policies."""
    with redirect_stdout(StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(regret, "of", lambda *_: {})  # no page has the bounds, which take most of the time
        assert main(command[2:]) == 0
    result = json.loads(printed.getvalue().splitlines()[-1])
    return list(result.get("runs", [result]))


def settings(command: list[str]) -> dict[str, Any]:
    """Return what a command says, as the lab says it."""
    named = {key: value for key, value in pairwise(command) if key.startswith("--")}
    end = next(k for k, word in enumerate(command) if word.startswith("--"))
    load = (named["--workload"], named.get("--arrivals", "poisson"))
    asked = {"racers": command[3:end], "workload": {value: key for key, value in LOADS.items()}[load], "seed": 0}
    if "--rate" in named:
        asked["rate"] = float(named["--rate"])
    assert named["--cost"] == "distserve-opt13b"
    return asked | {"count": int(named["--num"]), "slots": int(named["--max-batch-size"])}


def test_each_command_of_the_simulator_has_its_figures() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        found = [Shown.of(match) for match in SHOWN.finditer(text)]
        assert len(re.findall(r"^\./eb simulate", text, re.MULTILINE)) == sum(len(each.commands) for each in found) > 5
        assert text.count("/lab/#") == sum(bool(each.fragment) for each in found)


@pytest.mark.parametrize("each", EVERY)
def test_a_command_gives_the_figures_below_it(each: Shown) -> None:
    runs = [run for command in each.commands for run in runs_of(*command)]
    head, _, *rows = each.table
    assert len(rows) == len(runs)
    for row, run in zip(rows, runs):
        made = [COLUMNS[name](run) if name in COLUMNS else cell for name, cell in zip(head, row)]
        assert row == made


@pytest.mark.parametrize("each", [param for param in EVERY if param.values[0].fragment])
def test_a_link_to_the_lab_is_the_race_of_its_command(each: Shown) -> None:
    fragment = each.fragment
    packed = base64.urlsafe_b64decode(fragment + "=" * (-len(fragment) % 4))
    assert json.loads(zlib.decompress(packed, -15)) in [settings(command) for command in each.commands]

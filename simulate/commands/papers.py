"""Compute the published factors of policies again, and say which agree."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from rich.console import Console

from simulate.board import page
from simulate.board.figures import judge, play, read_table
from simulate.commands.arguments import Sections
from simulate.pool import spread
from terminal.console import say, table_of
from terminal.options import FOLDER, Argument, Choice, Number, Option, UsageError, Values

SEEDS, FEW_SEEDS = 5, 2


def options() -> Sections:
    """Return the options in sections of the help."""
    names = sorted({name for figure in read_table() for name in (figure.paper, *figure.policy.split("+"))})
    return {
        "arguments": [
            Argument("names", f"papers or policies (default: all): {', '.join(names)}", Choice(names, "NAME"), nargs=-1,
                     default=[], metavar="[NAME]..."),
        ],
        "options": [
            Option("--quick", f"a tenth of the requests and {FEW_SEEDS} seeds, not {SEEDS}: shows that all runs", None),
            Option("--out", "folder in which to write papers.md and results/papers.svg; results/arena.json there is the last "
                   "line of ./eb simulate arena", FOLDER),
            Option("--jobs", "number of processes (default: one per core)", Number(1)),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Compute the figures with each seed, and print how they compare."""
    if args.names and args.out:
        raise UsageError("--out writes the page of all papers. Leave the names out")
    never = json.loads((args.out / "results" / "arena.json").read_text("utf-8"))["never_best"] if args.out else []
    wanted = {*args.names}
    figures = [f for f in read_table() if not wanted or wanted & {f.paper, *f.policy.split("+")}]
    keys = [*product(figures, range(FEW_SEEDS if args.quick else SEEDS), [bool(args.quick)])]
    played = [*spread(play, keys, args.jobs, console, "pairs of runs computed")]
    factors = {f.name: [factor for (of, _, _), factor in zip(keys, played) if of is f] for f in figures}
    results = {figure.name: judge(figure.published, factors[figure.name]) for figure in figures}
    rows = [[f.name, f.says, page.published(f), page.ours(results[f.name]), results[f.name].verdict] for f in figures]
    heads = ("figure", "what", "published", "ours", "verdict")
    console.print(table_of("published factors, and ours with 95 % intervals", heads, rows, left=2, words=["verdict"]))
    if args.out:
        page.draw(figures, results, args.out / "results" / "papers.svg")
        (args.out / "papers.md").write_text(page.page(figures, results, never), "utf-8")
        say(console, f"written: {args.out / 'papers.md'}")
    shown = {name: {**result._asdict(), "factors": factors[name]} for name, result in results.items()}
    return {"figures": shown}

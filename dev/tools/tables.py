"""Writes the tables of the documentation that repeat what the code declares: flags, policies, routes.

A page names such a table between two lines: `<!-- table: routes -->` and `<!-- end -->`. The texts are those that
`--help` and `/openapi.json` show, so this module must not have any of its own.

usage: python -m dev.tools.tables [--check]     --check: write nothing; exit with 1 and name the pages that are stale
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import config
import policies
from app import create_app
from client.workloads import arrivals, catalog
from integrations.queue import menu
from integrations.queue.options import QUEUE
from integrations.ray.options import FLEET
from policies.orders._predictions import Predicting
from scheduling.options import options_of
from terminal.options import Option, Parameter

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# A help text, and what `--help` puts in brackets after it.
FACTS = re.compile(r"^(.*?)(?: \[([^\[\]]*)\])?$", re.DOTALL)
UNBOUNDED = str(1 << 60)
PREDICTIONS = options_of(Predicting)
Row = Sequence[str]


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines) + "\n"


def plain(text: str) -> str:
    """Return a text in which Markdown finds no table cell, emphasis or tag."""
    return re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    return "`" + text.replace("|", r"\|") + "`"


def described(params: Iterable[Parameter]) -> Iterator[tuple[Parameter, str, str, str]]:
    """Yield each flag of a help, its name with its value, its default and bounds, and its meaning."""
    for param in params:
        record = param.get_help_record(click.Context(click.Command("")))
        if isinstance(param, Option) and record is not None and (match := FACTS.match(record[1])):
            yield param, record[0], match[2] or "", match[1]


def flags(params: Iterable[Parameter]) -> str:
    """Return a table of flags. Their variables are left out where the name follows from the flag."""
    rows = []
    for param, name, facts, meaning in described(params):
        own = config.variable(str(param.name))
        rows.append((code(name), plain("; ".join(fact for fact in facts.split("; ") if fact != own)), plain(meaning)))
    return table(("flag", "default, bounds", "meaning"), rows)


def commands() -> str:
    """Return a table of the commands of `./eb`, as it lists them."""
    listed = re.findall(r"^  ([a-z]+) {2,}(.+)$", (ROOT / "eb").read_text("utf-8"), re.MULTILINE)
    return table(("command", "purpose"), ((code(f"./eb {name}"), plain(text)) for name, text in listed))


def options(name: str, is_order: bool) -> str:
    """Return the options of a loop or an order, with those of predictions as a link."""
    found = []
    predicts = ""
    for item in policies.form_of(name, is_order=is_order):
        option, default = str(item["name"]), str(item["default"])
        if option in PREDICTIONS:
            predicts = "[predictions](#predictions)"
            if option == "predictor" and default != PREDICTIONS[option].default:
                predicts += f", {code(f'predictor={default}')}"
            continue
        default = {UNBOUNDED: "no limit", "": "none"}.get(default, default)
        found.append(f"{code(option)} ({plain(default)}): {plain(str(item['help']))}")
    return "; ".join(filter(None, [*found, predicts]))


def kinds(head: str, names: Iterable[str], summary: Callable[[str], str], *, is_order: bool) -> str:
    """Return a table of loops or orders."""
    folder = "../policies/orders" if is_order else "../policies"
    rows = [
        (f"[{code(name)}]({folder}/{name.replace('-', '_')}.py)", plain(summary(name)), options(name, is_order))
        for name in names
    ]
    return table((head, "rule", "options (default)"), rows)


def predictions() -> str:
    rows = [
        (code(name), plain(f"{item.default}, {item.bounds}"), plain(item.help)) for name, item in PREDICTIONS.items()
    ]
    return table(("option", "default, bounds", "meaning"), rows)


def sentences(texts: Mapping[str, str]) -> str:
    """Return a table of names, each with what it does; those that do the same share a row."""
    rows: dict[str, list[str]] = {}
    for name, text in texts.items():
        rows.setdefault(text, []).append(code(name))
    return table(("name", "in front of an upstream"), ((", ".join(names), plain(text)) for text, names in rows.items()))


def routes(operations: Iterable[Any]) -> str:
    """Return a table of routes: a row has those that have the same summary."""
    rows: dict[str, list[str]] = {}
    for op in operations:
        rows.setdefault(op.summary, []).append(code(f"{op.method.upper()} {op.path}"))
    return table(("route", "purpose"), ((", ".join(names), plain(summary)) for summary, names in rows.items()))


def tables() -> dict[str, str]:
    """Return all tables by name."""
    service = create_app(config.Config(policy="dynamic")).extensions["service"]
    settings = config.command().sections
    loads = [(code(form), plain(text)) for form, text, *_ in arrivals.KINDS.values()]
    return {
        **{f"settings {group}": flags(settings[group]) for group in config.GROUPS.values()},
        "fleet": flags(FLEET),
        "queue": flags(QUEUE),
        "queue loops": sentences(menu.LOOPS),
        "queue orders": sentences(menu.ORDERS),
        "commands": commands(),
        "loads": table(("`--load`", "when requests are sent"), loads),
        "workloads": table(("`--workload`", "requests"), ((code(name), plain(t)) for name, t in catalog.describe())),
        "loops": kinds("loop", policies.names(), policies.summary, is_order=False),
        "orders": kinds("order", policies.order_names(), policies.order_summary, is_order=True),
        "predictions": predictions(),
        "routes": routes(service.operations),
    }


def stale(made: Mapping[str, str]) -> dict[Path, str]:
    """Return the pages whose tables are not as made, with their text as it should be; ValueError for an unknown name."""
    found: dict[Path, str] = {}
    named = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text("utf-8")
        named += [name for _, name, _ in TABLE.findall(text)]
        if unknown := set(named) - made.keys():
            raise ValueError(f"{page.name} has a table {unknown.pop()!r}. Use one of: {', '.join(made)}")
        whole = TABLE.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}", text)
        if whole != text:
            found[page] = whole
    if sorted(named) != sorted(made):
        raise ValueError(f"the pages have the tables {', '.join(sorted(named))}. Use each of {', '.join(made)} once")
    return found


def main(argv: Sequence[str]) -> int:
    """Write the tables, or with --check name the stale pages; return the exit code."""
    pages = stale(tables())
    for page, text in pages.items():
        if "--check" in argv:
            print(f"{page.relative_to(ROOT)} is stale. Run python -m dev.tools.tables")
        else:
            page.write_text(text, encoding="utf-8")
    return 1 if "--check" in argv and pages else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

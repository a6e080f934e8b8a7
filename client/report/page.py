"""The page of a comparison: one file that opens from disk, needs no network, and prints well.

    python -m client.report results/NAME

From top to bottom: the answer in a sentence, warnings, tables, the race of the slots, pictures, and how to repeat it.
"""

from __future__ import annotations

import base64
import html
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ..console import FINE, emit, guarded
from ..options import UsageError
from . import plots, race, store, summary
from .album import Album, Picture
from .tables import shown

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.answer { font-size: 1.15rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.warning { border-left: 4px solid #D55E00; padding: .1rem .8rem; margin: .4rem 0; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
.race { width: 100%; height: 60rem; border: 0; }
figure { margin: 1rem 0; break-inside: avoid; }
code { overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
footer { color: #777; font-size: .9rem; margin-top: 3rem; }
"""


def write(folder: Path) -> Path:
    """Write the plots and the page of a comparison; return the page's path."""
    results = store.read(folder)
    pictures = plots.draw_all(results)
    path = folder / "report.html"
    path.write_text(page(results, pictures), encoding="utf-8")
    return path


def page(results: store.Results, pictures: list[Picture]) -> str:
    """Return the page as HTML."""
    s = results.summary
    album = Album(results, [])
    warnings = "".join(f'<p class="warning">{text(w)}</p>' for w in s.get("warnings", []))
    answer = summary.headline(results) if results.runs else "Nothing was measured."
    tables = "".join(table(album, *each) for each in summary.tables(results))
    figures = "".join(figure(results, picture) for picture in pictures)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(s.get('name'))}</title><style>{STYLE}</style></head><body>"
        f'<h1>{text(s.get("name"))}</h1><p class="answer">{text(answer)}</p>{warnings}'
        f"{tables}<p>{text(summary.note(results))}</p>{race.embed(results)}{figures}{method(results)}</body></html>\n"
    )


def text(value: Any) -> str:
    """Escape a value for HTML."""
    return html.escape(str(value))


def table(album: Album, title: str, heads: list[str], lines: list[list[str]]) -> str:
    """Return a table as HTML; the clearly best values are bold."""
    top = "".join(f"<th>{text(head)}</th>" for head in heads)
    body = ""
    for policy, *cells in lines:
        color = album.look(policy)["color"]
        body += f'<tr><td><span class="swatch" style="background:{color}"></span>{text(policy)}</td>'
        body += "".join(f"<td>{bold(cell)}</td>" for cell in cells) + "</tr>"
    return (
        f'<h2>{text(title)}</h2><div class="wide"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bold(cell: str) -> str:
    """Return a cell as HTML; Markdown's bold becomes HTML's."""
    return f"<b>{text(cell[2:-2])}</b>" if cell.startswith("**") else text(cell)


def figure(results: store.Results, picture: Picture) -> str:
    """Return a picture as HTML, with its data embedded."""
    data = (results.folder / "plots" / f"{picture.name}.png").read_bytes()
    source = "data:image/png;base64," + base64.b64encode(data).decode()
    return (
        f'<figure><img src="{source}" alt="{text(picture.title)}"><figcaption>{text(picture.title)} '
        f"(plots/{text(picture.name)}.csv, .svg)</figcaption></figure>"
    )


def method(results: store.Results) -> str:
    """Return the section on how it was measured and how to repeat it."""
    s = results.summary
    command = str(s.get("command"))
    command += "" if "--seed" in command else f" --seed {s.get('seed')}"
    warmup = max((run.get("warmup_requests") or 0 for run in results.runs), default=0)
    lags = [run["client_lag"]["p99_ms"] for run in results.runs if run["client_lag"]["p99_ms"]]
    facts = [
        ("command", f"<code>{text(command)}</code>"),
        ("date", text(s.get("date"))),
        ("machine", text(", ".join(f"{v}" for v in s.get("machine", {}).values()))),
        ("versions", text(", ".join(f"{k} {v}" for k, v in s.get("versions", {}).items()))),
        ("load", "open loop, except where marked closed; latency counts from the intended send time"),
        ("warm-up", f"{warmup} unmeasured requests to each server before the first run"),
        ("client lag", f"p99 {shown(max(lags, default=None))} ms in the worst run"),
        ("intervals", "95 %, block bootstrap over the requests of one run, or over runs with 3 repeats "
         "or more; bold is best where no interval touches another"),
    ]  # fmt: skip
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in facts)
    return f'<h2>Method</h2><div class="wide"><table>{rows}</table></div>'


def main(argv: list[str] | None = None) -> int:
    """Write the page of a comparison again."""
    arguments = sys.argv[1:] if argv is None else argv

    def command(console: Console) -> int:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise UsageError("exactly one folder of a comparison is required. Use client.report results/NAME")
        try:
            emit(str(write(Path(arguments[0]))))
        except ValueError as error:
            raise UsageError(str(error)) from error
        return FINE

    return guarded(command, lambda: None)

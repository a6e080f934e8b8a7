"""The page of a comparison: one file that opens from disk, needs no network, and prints well.

    python -m client.report results/NAME

From top to bottom: title and verdict, warnings, tables, at most eight pictures and the others behind a line, the race of
the slots, and how to repeat it. Light or dark as the reader's system.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from . import plots, race, store, summary
from .album import Album, Picture
from .tables import shown

STYLE = Path(__file__).with_name("page.css")
KEY_PLOTS = 8
MAX_INLINE = 400_000  # characters; of a larger picture, the page has the PNG


def write(folder: Path) -> Path:
    """Write the plots and the page of a comparison; return the page's path."""
    results = store.read(folder)
    pictures = plots.draw_all(results)
    path = folder / "report.html"
    path.write_text(page(results, pictures), encoding="utf-8")
    return path


def page(results: store.Results, pictures: list[Picture]) -> str:
    """Return the page as HTML."""
    album = Album(results)
    first, more = chosen(results, pictures)
    sections = {
        "results": ("Results", "".join(table(album, *each) for each in summary.tables(results))
                    + (f'<p class="note">{text(summary.TERMS)}</p>' if results.runs else "")),
        "plots": ("Plots", grid(results, first) + folded(results, more)),
        "race": ("Race", race.embed(results)),
        "method": ("Method", method(results)),
    }  # fmt: skip
    known = {name: (title, content) for name, (title, content) in sections.items() if content}
    links = "".join(f'<a href="#{name}">{title}</a>' for name, (title, _) in known.items())
    body = "".join(
        f'<section id="{name}" class="{"racing" if name == "race" else ""}"><h2>{title}</h2>{content}</section>'
        for name, (title, content) in known.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(results.summary.get('name'))}</title><style>{STYLE.read_text('utf-8')}</style></head><body>"
        f"<header>{head(results, album)}</header>"
        f'<nav aria-label="Sections">{links}</nav><main>{warned(results)}{body}</main></body></html>\n'
    )


def head(results: store.Results, album: Album) -> str:
    """Return the title, the verdict, and the facts of the measurement."""
    s = results.summary
    answer = "Nothing was measured."
    caption = str(s.get("name"))
    if results.runs:
        answer = summary.headline(results)
        count = sum(run["num_prompts"] for run in results.runs)
        caption = f"{caption} · {album.caption(f'{count:,} requests')}"
    return f'<h1>{text(title(results))}</h1><p class="answer">{text(answer)}</p><p class="facts">{text(caption)}</p>'


def title(results: store.Results) -> str:
    """Return the names of the compared policies as a title."""
    names = ", ".join(results.policies) if results.policies else str(results.summary.get("name"))
    sweep = results.summary.get("sweep")
    if sweep:
        return f"{names} by {sweep['over']}"
    return f"{names} compared" if len(results.policies) > 1 else names


def warned(results: store.Results) -> str:
    """Return the warnings, folded into one line."""
    warnings = results.summary.get("warnings", [])
    if not warnings:
        return ""
    line = f"1 warning: {warnings[0]}"
    if len(warnings) > 1:
        line = f"{len(warnings)} warnings, such as: {warnings[0]}"
    rows = "".join(f"<li>{text(w)}</li>" for w in warnings)
    return f'<details class="warnings"><summary>{text(line)}</summary><ul>{rows}</ul></details>'


def chosen(results: store.Results, pictures: list[Picture]) -> tuple[list[Picture], list[Picture]]:
    """Return the pictures that answer most questions, at most `KEY_PLOTS`, and the others."""
    if results.summary.get("sweep") or not results.loads:
        return pictures[:KEY_PLOTS], pictures[KEY_PLOTS:]
    light, heavy = store.slug(results.lightest), store.slug(results.heaviest)
    lanes = [f"slots.{store.slug(policy)}.{heavy}" for policy in (results.policies[0], results.policies[-1])]
    wanted = [f"program-times.{heavy}", "latency-cdf", f"latency-over-tokens.{light}", *lanes, "waste", f"batch-over-time.{heavy}",
              f"queue-over-time.{heavy}", f"ttft-itl.{light}"]  # fmt: skip
    by_name = {picture.name: picture for picture in pictures}
    first = [by_name[name] for name in dict.fromkeys(wanted) if name in by_name]
    return first, [picture for picture in pictures if picture not in first]


def grid(results: store.Results, pictures: list[Picture]) -> str:
    """Return pictures, two a row."""
    return f'<div class="plots">{"".join(figure(results, picture) for picture in pictures)}</div>' if pictures else ""


def folded(results: store.Results, pictures: list[Picture]) -> str:
    """Return pictures behind a line that opens them."""
    shown = f'<details class="more"><summary>{len(pictures)} more plots</summary>{grid(results, pictures)}</details>'
    return shown if pictures else ""


def figure(results: store.Results, picture: Picture) -> str:
    """Return a picture as HTML, with how to read it, and its files."""
    path = results.folder / "plots" / picture.name
    kind, drawn = "svg+xml", path.with_name(f"{picture.name}.svg").read_bytes()
    if len(drawn) > MAX_INLINE:
        kind, drawn = "png", path.with_name(f"{picture.name}.png").read_bytes()
    says = f"{picture.says} " if picture.says else ""
    return (
        f'<figure><img src="data:image/{kind};base64,{base64.b64encode(drawn).decode()}" alt="{text(picture.title)}">'
        f"<figcaption>{text(says)}<small>plots/{text(picture.name)}.svg, .png</small></figcaption></figure>"
    )


def text(value: Any) -> str:
    """Escape a value for HTML."""
    return html.escape(str(value))


def table(album: Album, title: str, heads: list[str], lines: list[list[str]]) -> str:
    """Return a table as HTML; the clearly best values are bold."""
    top = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    body = ""
    for policy, *cells in lines:
        color = album.look(policy)["color"]
        body += f'<tr><td><span class="swatch" style="background:{color}"></span>{text(policy)}</td>'
        body += "".join(f"<td>{bold(cell)}</td>" for cell in cells) + "</tr>"
    return (
        f'<div class="wide"><table><caption>{text(title)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def bold(cell: str) -> str:
    """Return a cell as HTML; Markdown's bold becomes HTML's."""
    return f"<b>{text(cell[2:-2])}</b>" if cell.startswith("**") else text(cell)


def method(results: store.Results) -> str:
    """Return the section on how it was measured and how to repeat it."""
    s = results.summary
    command = str(s.get("command"))
    command += "" if "--seed" in command else f" --seed {s.get('seed')}"
    if "capacity" in s:  # otherwise a repeat would measure another rate
        command += f" --load {' '.join(s['loads'])}"
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
        ("intervals", "95 %, block bootstrap over the requests of one run, or Student's t over 3 runs or more; bold is best "
         "where no interval touches another"),
    ]  # fmt: skip
    if any("simulation" in run for run in results.runs):  # which neither warms up nor has a client that could be late
        facts = [fact for fact in facts if fact[0] not in ("warm-up", "client lag")]
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in facts)
    return f'<div class="wide"><table class="method">{rows}</table></div>'

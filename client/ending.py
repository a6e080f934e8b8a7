"""The end of a comparison: its table, its page, and copies of both for a README."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from terminal.console import emit, say

from .report import store, summary, tables

README_PLOTS = {
    "comparison-latency": "latency-over-tokens.{light}", "comparison-cdf": "latency-cdf",
    "comparison-waste": "waste", "comparison-batch": "batch-over-time.{heavy}",
}  # fmt: skip


def finish(folder: Path, console: Console, plots: bool, readme: Path | None = None) -> None:
    """Print and write the table, draw the page, and print the folder's name; copy table and plots for a README."""
    results = store.read(folder)
    if results.runs:
        text = write_table(results)
        if console.is_terminal:
            console.print(*summary.short_tables(results), sep="\n")
        else:
            say(console, text)
        say(console, summary.headline(results))
        late = tables.late_runs(results.runs)
        if late:
            say(console, f"warning: {late}")
        if plots:
            draw_page(folder, console)
    emit(str(folder))
    if results.runs and readme:
        copy_for_readme(results, readme, console)


def copy_for_readme(results: store.Results, into: Path, console: Console) -> None:
    """Copy the table and some plots to a folder, under fixed names."""
    into.mkdir(parents=True, exist_ok=True)
    s = results.summary
    origin = f"Made by `{s['command']}` on {s['machine'].get('processor')}, {s['date'][:10]}."
    table = (results.folder / "table.md").read_text("utf-8")
    (into / "comparison.md").write_text(f"{table}\n{origin}\n", encoding="utf-8")
    light, heavy = store.slug(results.lightest), store.slug(results.heaviest)
    for name, kind in README_PLOTS.items():
        picture = results.folder / "plots" / f"{kind.format(light=light, heavy=heavy)}.png"
        if picture.is_file():
            shutil.copyfile(picture, into / f"{name}.png")
    say(console, f"for the README: {into / 'comparison.md'} and {', '.join(README_PLOTS)} beside it")


def write_table(results: store.Results) -> str:
    """Write the table beside the results; return it."""
    text = summary.markdown(results)
    (results.folder / "table.md").write_text(text, encoding="utf-8")
    return text


def draw_page(folder: Path, console: Console) -> None:
    """Draw plots and page; without matplotlib print how to install it and how to draw later."""
    try:
        from .report import page
    except ImportError:
        say(
            console,
            "note: no plots, because matplotlib is not installed. Install it (pip install -r "
            f"client/requirements.txt) and run python -m client.report {folder}",
        )
        return
    say(console, f"the report is {page.write(folder)}; open it in a browser")

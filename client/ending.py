"""The end of a comparison: its table and its page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from terminal.console import emit, say

from .report import store, summary, tables


def finish(folder: Path, console: Console, plots: bool) -> None:
    """Print and write the table, draw the page, and print the folder's name."""
    results = store.read(folder)
    if results.runs:
        text = write_table(results)
        if console.is_terminal:
            console.print(*summary.short_tables(results), sep="\n")
        else:
            say(console, text)
        say(console, summary.headline(results))
        if late := tables.lateness(results.runs):
            say(console, f"warning: {late}")
        if plots:
            draw_page(folder, console)
    emit(str(folder))


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

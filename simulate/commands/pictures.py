"""The picture of an arena, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
from rich.console import Console

from simulate.arena.arena import REFERENCE, Standing
from terminal.console import say

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # of ratios


def draw(standings: Many[Standing], heads: dict[str, str], path: Path, console: Console) -> None:
    """Draw a panel for each figure, with a row for each policy and its interval, the best on top.

    Without matplotlib print a note, because the figures are printed anyway.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(console, "no picture: matplotlib is not installed. Run: pip install matplotlib")
        return
    figure = Figure(figsize=(8, 1.5 + 0.2 * len(standings)), layout="constrained")
    rows = range(len(standings), 0, -1)
    panels = figure.subplots(1, len(heads), sharey=True)
    for axes, (field, head) in zip(panels, heads.items()):
        means = [standing.beside[field].mean for standing in standings]
        halves = [standing.beside[field].half or 0.0 for standing in standings]
        axes.errorbar(means, rows, xerr=halves, fmt="o", markersize=3, linewidth=1)
        if field == "misses":
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+g}")
            axes.set_xlabel("points", fontsize=8)
        else:
            axes.set_xticks(np.log(TICKS), [f"{tick:g}" for tick in TICKS])
            axes.set_xlim(min([*means, -0.5]) - 0.2, max([*means, 0.5]) + 0.2)
            axes.set_xlabel("times", fontsize=8)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.set_title(head, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    panels[0].set_yticks(list(rows), [standing.policy for standing in standings], fontsize=7)
    figure.supxlabel(f"beside {REFERENCE}, with 95 % intervals: further left is better", fontsize=8)
    figure.savefig(path, dpi=120)
    say(console, f"written: {path}")

"""Draw the original's plot: mean latency over requested tokens, from the tables that servers keep.

    curl localhost:8500/stats/token_data.csv > dynamic.csv
    python client/graph.py nobatch.csv dynamic.csv

It writes graph.png and graph.svg; a table's name is the policy's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    __package__ = Path(__file__).resolve().parent.name
    from terminal import packages as packages

import numpy as np

from terminal.console import FINE, USAGE

from .report import figures


def draw(tables: Sequence[str]) -> None:
    """Draw each table with the line that fits it; ImportError, OSError or ValueError if that cannot be done."""
    from matplotlib.figure import Figure

    from .report.album import MARKERS, finish, save

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for i, path in enumerate(tables):
        tokens, latency = np.loadtxt(path, delimiter=",", ndmin=2, encoding="utf-8-sig").T
        line = figures.fit(tokens, latency)
        label = f": {line[1]:.2f} s + {line[0]:.4f} s/token, r = {line[2]:.2f}" if line else ""
        axes.plot(tokens, latency, markersize=3, marker=MARKERS[i % len(MARKERS)], label=Path(path).stem + label)
    finish(axes, "requested tokens", "mean latency (s)")
    save(figure, Path(), "graph", [])


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot of these tables, or print how to use it; return the exit code."""
    tables = sys.argv[1:] if argv is None else argv
    if not tables or tables[0].startswith("-"):
        print(__doc__)
        return FINE
    try:
        draw(tables)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}. Use a server's token data tables, and install client/requirements.txt", file=sys.stderr)
        return USAGE
    return FINE


if __name__ == "__main__":
    sys.exit(main())

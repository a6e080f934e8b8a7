"""Draw the original's plot: mean latency over requested tokens, from the tables that servers keep.

\b
    curl localhost:8500/stats/token_data.csv > dynamic.csv
    python client/graph.py nobatch.csv dynamic.csv
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
from rich.console import Console

from terminal import options
from terminal.console import FINE, emit
from terminal.options import FILE, Argument, Command, Option, UsageError

from .display import guarded
from .report import figures

TABLES = Argument("tables", "lines of tokens,seconds; a file's name is the policy's", FILE, nargs=-1, required=True)
OUT = Option("--out", "picture to write, as PNG and SVG", FILE, default=Path("graph.png"))


def draw(tables: Sequence[Path], out: Path) -> None:
    """Draw each table with the line that fits it."""
    from .report.album import another, drawn, finish

    with drawn(out.parent, out.stem, "Mean latency over requested tokens", "") as ((axes,), _):
        for i, path in enumerate(tables):
            tokens, latency = np.loadtxt(path, delimiter=",", ndmin=2, encoding="utf-8-sig").T
            line = figures.fit(tokens, latency)
            label = path.stem + (f": {line[1]:.2f} s + {line[0]:.4f} s/token, r = {line[2]:.2f}" if line else "")
            axes.plot(tokens, latency, markersize=3, label=label, **another(i))
        finish(axes, "requested tokens", "mean latency (s)")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot and print its file name."""

    def command(console: Console) -> int:
        line = Command("graph.py", __doc__ or "", {"arguments": [TABLES, OUT]})
        args = options.read(line, sys.argv[1:] if argv is None else argv)
        try:
            draw(args.tables, args.out)
        except ImportError as error:
            raise UsageError(f"{error}. Install matplotlib with pip install -r client/requirements.txt") from error
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot draw {args.out}: {error}. Use a server's token data tables") from error
        emit(str(args.out))
        return FINE

    return guarded(command, lambda: None)


if __name__ == "__main__":
    sys.exit(main())

"""Draw the original's plot: mean latency over requested tokens, from the tables that servers keep.

A table has a line `num_tokens,mean_latency_s` for each length and no header; its file's name is the policy's. For example:

\b
    curl localhost:8500/stats/token_data.csv > dynamic.csv
    python client/graph.py nobatch.csv dynamic.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    __package__ = Path(__file__).resolve().parent.name
    from terminal import packages as packages

from rich.console import Console

from terminal import options
from terminal.console import FINE, emit, say
from terminal.options import FILE, Argument, Command, Option, UsageError

from .display import guarded
from .report import figures

Table = list[tuple[float, float]]


def read(path: Path, console: Console) -> Table:
    """Return the rows of a table; report and skip invalid lines."""
    rows: Table = []
    invalid: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, cells in enumerate(csv.reader(file), 1):
                try:
                    tokens, latency = map(float, cells)
                    rows.append((tokens, latency))
                except ValueError:
                    invalid.append(number)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"cannot read {str(path)!r}: {reason}. Use a server's token data table") from error
    if not rows:
        raise UsageError(f"{str(path)!r} has no rows of num_tokens,seconds. Use a server's token data table")
    if invalid:
        say(console, f"note: {path}: skipped line {', '.join(map(str, invalid[:5]))}")
    return sorted(rows)


def name_of(path: Path) -> str:
    """Return the policy's name: the file's name without the original's prefix."""
    return path.stem.replace("token_data", "").strip("_-. ") or path.stem


def draw(tables: dict[str, Table], out: Path) -> None:
    """Draw the plot into a file; its suffix (png, svg, pdf) is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from .report.album import KNOWN, OTHERS, finish

    picture, axes = plt.subplots(figsize=(7.2, 4.2))
    for i, (name, rows) in enumerate(tables.items()):
        x, y = zip(*rows)
        line = figures.fit(x, y)
        label = name if line is None else f"{name}: {line[1]:.2f} s + {line[0]:.4f} s/token, r = {line[2]:.2f}"
        axes.plot(x, y, marker="o", markersize=3, color=KNOWN.get(name, OTHERS[i % len(OTHERS)]), label=label)
    finish(axes, "requested tokens", "mean latency (s)")
    picture.tight_layout()
    picture.savefig(out, dpi=130)
    plt.close(picture)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plot and print its file name."""

    def command(console: Console) -> int:
        tables = Argument("tables", "tables (default: *token_data*.csv in this folder)", FILE, nargs=-1, default=[])
        out = Option("--out", "file to write", FILE, default=Path("graph.png"))
        command_line = Command("graph.py", __doc__ or "", {"arguments": [tables, out]})
        args = options.read(command_line, sys.argv[1:] if argv is None else argv)
        paths = args.tables or sorted(Path().glob("*token_data*.csv"))
        if not paths:
            raise UsageError("no table is given, and this folder has no *token_data*.csv. Use graph.py FILE.csv")
        tables_by_name = {name_of(path): read(path, console) for path in paths}
        try:
            draw(tables_by_name, args.out)
        except ImportError as error:
            raise UsageError(f"{error}. Install matplotlib with pip install -r client/requirements.txt") from error
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot write {str(args.out)!r}: {error}. Use --out FILE.png") from error
        emit(str(args.out))
        return FINE

    return guarded(command, lambda: None)


if __name__ == "__main__":
    sys.exit(main())

"""Simulate the requests of a comparison and show the predictions beside the measurements."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from client.report import tables
from simulate.commands.arguments import Sections
from simulate.commands.inputs import noise_of
from simulate.measured import predict
from terminal.console import say, table_of
from terminal.options import FOLDER, Argument, Option, Values


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [Argument("folder", "folder that client.compare wrote", FOLDER, required=True, metavar="DIR")],
        "options": [
            Option("--cost", "name of a cost model, or a file written by `calibrate` (default: the runs' own steps)")
        ],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Simulate each run of a comparison; runs that cannot be simulated are noted."""
    if args.cost:
        noise_of(args.cost, console)
    prediction = predict.predict(args.folder, args.cost)
    rows = []
    for c in prediction["compared"]:
        both = (f"{c[key]:.3f} / {c[f'simulated_{key}']:.3f}" for key in ("mean_s", "p99_s"))
        alike = f"{c['steps_alike'] / c['steps']:.1%}" if c.get("steps") else "-"
        rows.append((c["policy"], c["load"], *both, f"{c['mape']:.1%}", alike))
        for name, (low, high) in c.get("intervals", {}).items():
            say(
                console, f"{c['policy']}, {c['load']}: {name} expected in 90 of 100 runs from {low:.3f} to {high:.3f} s"
            )
    for run in prediction["left_out"]:
        say(console, f"note: {run['policy']}, {run['load']} left out: {run['why']}")
    if not prediction["compared"]:
        return prediction
    heads = ("policy", "load", "mean s", "p99 s", "off by", "steps alike")
    console.print(table_of(f"measured / simulated by {prediction['cost']}", heads, rows, left=2))
    for c in prediction["compared"]:
        say(console, f"{c['policy']}, {c['load']}: {c['regret']}")
        if "blame" in c:
            console.print(tables.blame(f"{c['policy']}, {c['load']}", c["blame"]))
    say(console, f"written: {args.folder / 'simulated.csv'}. Draw it: python -m client.report {args.folder}")
    return prediction

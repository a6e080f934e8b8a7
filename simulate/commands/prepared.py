"""What the commands share: the requests and the cost of a step, after every option was checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console

from costs.cost import Cost, Host
from simulate import workloads
from simulate.commands.inputs import make_cost, make_rows
from simulate.commands.option_checks import check_engine, check_policies, notes
from simulate.measured.intervals import Noise, of_cost
from terminal.console import say
from terminal.options import Parameter, Values

Sections = dict[str, Sequence[Parameter]]


def prepare(
    args: Values, console: Console, *, reported: Collection[str] = (), **how: bool
) -> tuple[Cost, Host, workloads.Rows]:
    """Check every option and return cost, host and requests; print the notes about them."""
    chosen = check_policies(args, reported)
    cost, host = make_cost(args)
    check_engine(args, cost, chosen)
    rows = make_rows(args, **how)
    for note in notes(args, chosen, rows):
        say(console, f"note: {note}")
    return cost, host, rows


def noise_of(cost: str, console: Console) -> Noise | None:
    """Return what a cost model leaves unexplained; print why predictions by an older file have no intervals."""
    noise = of_cost(cost)
    if noise is None and cost.endswith(".json"):
        say(
            console,
            f"note: {cost} lacks the errors of points left out of its fit, so predictions have no intervals. Calibrate again",
        )
    return noise

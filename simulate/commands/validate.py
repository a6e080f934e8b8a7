"""Send the same arrivals through a real server and the simulator, side by side."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import config
from client.workloads.corpus import USUAL_CONTEXT
from config import Config
from costs import mock
from costs.cost import Cost
from simulate.commands import option_checks
from simulate.commands.arguments import Sections, engine_options, policies_argument
from simulate.commands.calibrate import report
from simulate.commands.inputs import make_cost, make_policies, noise_of, with_engine
from simulate.commands.option_checks import refuse
from simulate.measured import calibrate, comparison, intervals, validate
from simulate.measured.intervals import Interval, Noise
from simulate.measured.served import Record
from terminal.console import say, table_of
from terminal.options import POSITIVE, Number, Option, UsageError, Values

BAR = 14  # characters of the longest bar of the batch sizes
NOTE = (
    "The command also takes these flags of the server, see './server.sh --help': "
    f"{', '.join(map(config.flag, validate.SERVER))}.\n\nBounds: {comparison.BOUNDS}.\n\n"
    "Exit status: 0 within the bounds, 1 beyond one or when a request fails, 2 for a wrong command line."
)


def options() -> Sections:
    """Return the options in sections of the help."""
    timed = " (default: that of --model mock:NAME; for any other --model its engine is timed first)"
    return {
        "arguments": [policies_argument()],
        # No --kv-tokens: the server reports its KV memory.
        "engine": engine_options(kv=False, speculation=False, cost=None, default_cost=timed, max_tokens_per_step=256),
        "arrivals": [
            Option("--rate", "requests per second; choose a utilization of about 0.7", POSITIVE, default=1.0),
            Option("--num", "requests", Number(1), default=60),
            Option("--seed", "random seed", Number(0), default=0),
            Option(
                "--learn", "add the errors of this run to the file of --cost, to set the width of later intervals", None,
            ),
        ],
        "server": [
            Option(
                "--server-flag", "flag of the server, as in --server-flag=--model=bard; may be repeated", metavar="FLAG",
                repeat=True, default=[],
            ),
            # The server's own flags, which are passed on to it.
            *(Option(config.flag(name), "", hidden=True) for name in validate.SERVER),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve the same arrivals by a real server and by the simulator; `good` is false when an error exceeds its bound."""
    flags = server_flags(args)
    chosen, asked = make_policies(args)
    cost, noise = _cost_to_validate(args, validate.settings(flags), console)
    refuse(args, option_checks.of_cost(cost, args, ", ".join(args.policies), asked))
    if args.learn and (noise is None or not args.cost):
        raise UsageError(
            "--learn needs the file of a calibration. Use --cost FILE.json, made by 'python -m simulate calibrate'"
        )
    learn = Path(args.cost) if args.learn else None
    trace = validate.draw(args.rate, args.num, args.seed)
    runs, beyond = [], []
    for each in chosen:
        validation = validate.validate(each, cost, trace, flags, console, noise, learn)
        show(console, validation)
        beyond += [(each.name, c) for c in validation.compared if not c.good]
        runs.append(validation.to_dict())
    say(console, f"bounds: {comparison.BOUNDS}")
    for policy, c in beyond:
        say(console, f"error: {policy}: {c.name} is off by {c.error:+.1%}, bound {c.bound:.0%}")
    if beyond:
        say(console, "Calibrate again when nothing else runs on this machine, or lower --rate")
    return {"good": not beyond, "runs": runs}


def server_flags(args: Values) -> list[str]:
    """Return the flags that the server is started with, beside its policy's options."""
    own = ["--max-batch-size", str(args.max_batch_size)]
    own += ["--max-tokens-per-step", str(args.max_tokens_per_step)]
    passed = [
        word for name in validate.SERVER if args.is_given(name) for word in (config.flag(name), getattr(args, name))
    ]
    return [*own, *passed, *args.server_flag]


def _cost_to_validate(args: Values, server: Config, console: Console) -> tuple[Cost, Noise | None]:
    """Return the cost model of --cost, or of a mock server, or one fitted to the server's engine now, with its noise."""
    if args.cost:
        return make_cost(args)[0], noise_of(args.cost, console)
    refuse(args, [("cost_option", "has no effect without --cost. Add it")])
    if not server.model:
        raise UsageError(
            "--cost is missing. Use a file of 'python -m simulate calibrate', or --model NAME to time that engine first"
        )
    if mock.is_mock(server.model):
        return with_engine(args, mock.load(server.model).law), None
    say(console, f"no --cost: timing the engine of {server.model} first")
    flags = ["--model", server.model, "--load-format", server.load_format, "--dtype", server.dtype,
             "--quantize", server.quantize, "--kv-dtype", server.kv_dtype, "--threads", str(server.compute_threads), "--context", str(USUAL_CONTEXT)]  # fmt: skip
    points = calibrate.grid("small", args.max_tokens_per_step, USUAL_CONTEXT)
    fit, timed = calibrate.calibrate(calibrate.shown(calibrate.probe(flags, {}), console), points)
    report(fit, console)
    return with_engine(args, fit.cost), intervals.of_points(timed)


def show(console: Console, validation: validate.Validation) -> None:
    """Print figures, errors, bounds, batch sizes and agreement."""
    console.print(
        table_of_compared(
            f"{validation.served.chosen.name}, {len(validation.served.outcomes)} requests", validation.compared
        )
    )
    host = validation.host
    console.print(
        f"host, from requests sent one at a time: {1000 * (host.alpha0 + host.alpha1):.1f} ms a request, "
        f"{1000 * host.sigma:.2f} ms a step",
        highlight=False,
    )
    console.print(_histogram(*validation.steps))
    predicted, measured = map(len, validation.steps)
    console.print(
        f"agreement: {comparison.agreement(*validation.steps):.1%} of the steps have the same requests in the batch "
        f"({predicted:,} steps predicted, {measured:,} measured)",
        highlight=False,
    )


def table_of_compared(title: str, compared: list[comparison.Comparison]) -> Table:
    """Return predictions beside measurements; columns that no figure has are left out."""
    columns = {"": [c.name for c in compared], "predicted": [_shown(c.predicted, c.unit) for c in compared]}
    if any(c.interval for c in compared):
        columns["90 % interval"] = ["" if c.interval is None else _between(c.interval) for c in compared]
    columns["measured"] = [_shown(c.measured, c.unit) for c in compared]
    columns["error"] = [f"{c.error:+.1%}" for c in compared]
    if any(c.bound for c in compared):
        columns["bound"] = ["" if c.bound is None else f"{c.bound:.0%}" for c in compared]
    return table_of(title, list(columns), list(zip(*columns.values())))


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s" if value >= 1 else f"{1000 * value:.1f} ms"
    return f"{value:.1%}" if unit == "%" else f"{value:.2f}"


def _between(interval: Interval) -> str:
    scale, unit = (1, "s") if interval.low >= 1 else (1000, "ms")
    low, high = (f"{bound * scale:.3g}" for bound in interval)
    return f"{low} to {high} {unit}"


def _histogram(predicted: Many[Record], measured: Many[Record]) -> Table:
    """Return the shares of the steps by batch size, as numbers and bars."""
    sides = [comparison.batch_sizes(side) for side in (predicted, measured)]
    rows = [
        (first, last, [sum(side[n] for n in range(first, last + 1)) / side.total() for side in sides])
        for first, last in comparison.ranges([*sides[0], *sides[1]])
    ]
    highest = max(share for *_, shares in rows for share in shares)
    lines = [
        (f"{first}" if first == last else f"{first}-{last}",
         *(f"{share:6.1%} {'█' * round(BAR * share / highest)}" for share in shares))
        for first, last, shares in rows
    ]  # fmt: skip
    heads = ("batch size", "predicted", "measured")
    return table_of("share of the steps by batch size", heads, lines, 0, heads[1:])

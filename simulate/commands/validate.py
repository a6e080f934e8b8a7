"""Send the same arrivals through a real server and the simulator, side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console

import config
from client.workloads import catalog, corpus, programs
from client.workloads.arrivals import Arrivals
from client.workloads.corpus import USUAL_CONTEXT
from client.workloads.sample import parse
from config import Config
from costs import mock
from costs.cost import Cost
from simulate.commands.arguments import Sections, engine_options, policies_argument
from simulate.commands.calibrate import flags_of, report
from simulate.commands.fit import table_of_compared
from simulate.commands.inputs import make_cost, make_policies, noise_of, with_engine
from simulate.commands.option_checks import refuse
from simulate.measured import calibrate, comparison, intervals, validate
from simulate.measured.intervals import Noise
from terminal.console import say
from terminal.options import POSITIVE, Number, Option, Read, UsageError, Values

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
            Option("--num", "requests, or programs", Number(1), default=60),
            Option(
                "--workload", f"send programs instead: {', '.join(kind.form for kind in programs.KINDS.values())}",
                Read(lambda text: parse(text, programs.KINDS) and text, "NAME"),
            ),
            Option("--seed", "random seed", Number(0), default=0),
        ],
        "server": [Option(config.flag(name), "", hidden=True) for name in validate.SERVER],  # which gets them
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve the same arrivals by a real server and by the simulator; `good` is false when an error exceeds its bound."""
    trace = validate.draw(args.rate, args.num, args.seed)
    if args.workload:
        plan = catalog.draw(args.workload, args.num, Arrivals("poisson", args.rate), args.seed, corpus.load())
        trace = plan.planned
        for note in plan.notes:
            say(console, f"note: {note}")
    flags = server_flags(args)
    chosen, _ = make_policies(args)
    cost, noise = _cost_to_validate(args, config.load(flags).config, console)
    runs = []
    for each in chosen:
        validation = validate.validate(each, cost, trace, flags, console, noise)
        show(console, validation)
        runs.append((validation.to_dict(), validation.compared))
    say(console, f"bounds: {comparison.BOUNDS}")
    beyond = [(told["policy"], c) for told, compared in runs for c in compared if not c.good]
    for policy, c in beyond:
        say(console, f"error: {policy}: {c.name} is off by {c.error:+.1%}, bound {c.bound:.0%}")
    if beyond:
        say(console, "Calibrate again when nothing else runs on this machine, or lower --rate")
    return {"good": not beyond, "runs": [told for told, _ in runs]}


def server_flags(args: Values) -> list[str]:
    """Return the flags that the server is started with, beside its policy's options."""
    own = ["--max-batch-size", str(args.max_batch_size)]
    own += ["--max-tokens-per-step", str(args.max_tokens_per_step)]
    passed = [
        word for name in validate.SERVER if args.is_given(name) for word in (config.flag(name), getattr(args, name))
    ]
    return [*own, *passed]


def _cost_to_validate(args: Values, server: Config, console: Console) -> tuple[Cost, Noise | None]:
    """Return the cost model of --cost, or of a mock server, or one fitted to the server's engine now, with its noise."""
    if args.cost:
        return make_cost(args)[0], noise_of(args.cost, console)
    refuse(args, [("cost_option", "has no effect without --cost. Add it")])
    if not server.model:
        raise UsageError(
            "--cost is missing. Use a file of './eb simulate calibrate', or --model NAME to time that engine first"
        )
    if mock.is_mock(server.model):
        return with_engine(args, mock.load(server.model).law), None
    say(console, f"no --cost: timing the engine of {server.model} first")
    flags = flags_of(server, threads=server.compute_threads, context=USUAL_CONTEXT)
    points = calibrate.grid("small", args.max_tokens_per_step, USUAL_CONTEXT)
    fit, timed = calibrate.calibrate(calibrate.shown(calibrate.probe(flags, {}), console), points)
    report(fit, console)
    return with_engine(args, fit.cost), intervals.of_points(timed)


def show(console: Console, validation: validate.Validation) -> None:
    """Print figures, errors, bounds and agreement."""
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
    predicted, measured = map(len, validation.steps)
    console.print(
        f"agreement: {comparison.agreement(*validation.steps):.1%} of the steps have the same requests in the batch "
        f"({predicted:,} steps predicted, {measured:,} measured)",
        highlight=False,
    )

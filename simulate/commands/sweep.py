"""Serve a workload at several rates, once for each seed, and draw latency and throughput over the rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from rich.console import Console

from client.report import figures, store, summary
from simulate.commands import run as run_command
from simulate.commands.arguments import Sections, arrival_options, engine_options, policies_argument
from simulate.pool import spread
from terminal.console import say
from terminal.options import FOLDER, POSITIVE, Number, Option, Values

NOTE = (
    "Each rate is served by each policy once for each seed. A seed draws other requests, or shuffles the gaps of a trace (0: as "
    "they are). Ctrl-C keeps what is done. ./eb sweep measures real servers instead."
)


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [policies_argument()],
        "sweep": [
            Option("--rates", "requests per second, or programs; the times of a --trace are scaled to them", POSITIVE,
                   several=True, default=[1.0, 2.0, 4.0, 8.0]),
            Option("--repeats", "runs of each policy at each rate, with the seeds from --seed on; bands need 3", Number(1),
                   default=5),
            Option("--jobs", "number of processes (default: one per core)", Number(1)),
        ],
        "engine": engine_options(),
        "arrivals": [option for option in arrival_options() if option.name not in ("rate", "speed")],
        "result": [
            Option("--out", "folder for the results (default: a new one in results/)", FOLDER),
            Option("--no-plots", "write no plots and no page", None),
            *run_command.LIMIT_OPTIONS,
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve each rate with each policy and seed; write and draw the results."""
    args.out = args.out or Path("results") / f"{datetime.now():%Y%m%d-%H%M%S}-sweep"
    run_command.seeded(args, args.seed, console, args.rates[0])  # what is wrong is refused before anything runs
    folder = run_command.make_store(args, [f"rate:{rate:g}" for rate in sorted(args.rates)])
    runs = folder.summary["runs"]
    try:
        for numbers in serve_all(args, console, range(args.seed, args.seed + args.repeats)):
            folder.add({name: numbers[name] for name in store.LABELS}, numbers)
    except KeyboardInterrupt:
        folder.warn("stopped early by Ctrl-C")
        raise
    finally:
        folder.summary["sweep"] = of_sweep(args, runs)
        folder.save()
        folder.close()
        run_command.finish(console, args)
        results = store.read(args.out)
        console.print(*summary.short_tables(results), sep="\n")
        say(console, summary.headline(results))
    return {"runs": runs}


def of_sweep(args: Values, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a folder says of a sweep: its rates, and the lowest at which a policy was overloaded with most seeds."""
    late: dict[str, float] = {}
    for policy, rate in sorted({(run["policy"], run["value"]) for run in runs}, reverse=True):
        each = [run["overloaded"] for run in runs if (run["policy"], run["value"]) == (policy, rate)]
        if 2 * sum(each) > len(each):
            late[policy] = rate
    return {"over": "rate", "values": sorted(args.rates), "saturation": late}


def play(args: Values, seed: int, rate: float) -> list[dict[str, Any]]:
    """Return the figures of each policy at a rate with a seed."""
    scenario, found = run_command.seeded(args, seed, Console(quiet=True), rate), []
    for chosen in scenario.policies:
        numbers = run_command.figures_of(args, scenario.serve(chosen), scenario.rows, chosen, seed, brief=True)
        more = {"load": f"rate:{rate:g}", "value": rate, "repeat": seed}
        found.append({**store.short(numbers), **more, "overloaded": figures.is_overloaded(numbers, numbers["e2els"])})
    return found


def serve_all(args: Values, console: Console, seeds: Sequence[int], start: str = "spawn") -> Iterator[dict[str, Any]]:
    """Return the figures of all runs as they come, all rates of one seed after another, from one process a core."""
    cases = [*product(seeds, sorted(set(args.rates)))]
    return chain.from_iterable(spread(partial(play, args), cases, args.jobs, console, "rounds", start))

"""Serve a workload at several rates, once for each seed, and draw latency and throughput over the rate."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime
from itertools import chain, product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from client.report import figures, store, summary
from scheduling.hook_limit import HookTimeout
from simulate import hook_limit
from simulate.commands import run as run_command
from simulate.commands.arena import cores
from simulate.commands.arguments import Sections, arrival_options, engine_options, policies_argument
from simulate.rows import Rows
from simulate.scenario import Scenario
from terminal.console import say
from terminal.options import FOLDER, POSITIVE, Number, Option, Values
from terminal.progress import counted

RATES = [1.0, 2.0, 4.0, 8.0]
PER_REQUEST = set(store.ARRAYS) - {"server_before", "server_after"}  # which a worker does not send
NOTE = (
    "Each rate is served by each policy once for each seed. A seed draws other requests, or shuffles the gaps of a trace (0: as "
    "they are). Ctrl-C keeps what is done."
)


def options() -> Sections:
    """Return the options in sections of the help."""
    arrivals = [option for option in arrival_options() if option.name not in ("rate", "speed")]
    return {
        "arguments": [policies_argument()],
        "sweep": [
            Option("--rates", "requests per second, or programs; the times of a --trace are scaled to them", POSITIVE,
                   several=True, default=RATES),
            Option("--repeats", "runs of each policy at each rate, with the seeds from --seed on; bands need 3", Number(1),
                   default=5),
            Option("--jobs", "number of processes (default: one per core)", Number(1)),
        ],
        "engine": engine_options(),
        "arrivals": arrivals,
        "result": [
            Option("--out", "folder for the results (default: a new one in results/)", FOLDER),
            Option("--no-plots", "write no plots and no page", None),
            *run_command.limit_options(),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve each rate with each policy and seed; write and draw the results."""
    args.out = args.out or Path("results") / f"{datetime.now():%Y%m%d-%H%M%S}-sweep"
    seeds = range(args.seed, args.seed + args.repeats)
    at(args, args.rates[0], args.seed, console)  # what is wrong is refused before anything runs
    folder = run_command.make_store(args, [f"rate:{rate:g}" for rate in sorted(args.rates)])
    folder.summary |= head_of(args, [])
    try:
        for numbers in serve_all(args, console, seeds):
            labels = {name: numbers[name] for name in (*store.LABELS, "value")}
            folder.add(labels, numbers)
            folder.summary |= head_of(args, folder.summary["runs"])
    except KeyboardInterrupt:
        folder.warn("stopped early by Ctrl-C")
        raise
    finally:
        if folder.summary["runs"]:
            run_command.finish(folder, console, args)
            results = store.read(args.out)
            console.print(*summary.short_tables(results), sep="\n")
            say(console, summary.headline(results))
        else:
            folder.close()
    done = folder.summary
    return {"runs": done["runs"], "saturation": done["sweep"]["saturation"], "processes": args.jobs or cores()}


def head_of(args: Values, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a folder says of a sweep: its rates, and the lowest at which a policy was overloaded with most seeds."""
    late: dict[str, float] = {}
    for policy, rate in sorted({(run["policy"], run["value"]) for run in runs}, reverse=True):
        each = [run["overloaded"] for run in runs if (run["policy"], run["value"]) == (policy, rate)]
        if 2 * sum(each) > len(each):
            late[policy] = rate
    return {"sweep": {"over": "rate", "values": sorted(args.rates), "saturation": late}}


def at(args: Values, rate: float, seed: int, console: Console) -> Scenario[Rows]:
    """Return the scenario of a rate and a seed."""
    given = Values(**{**vars(args), "rate": rate, "speed": 1.0, "origin": {**args.origin, "rate": "flag"}})
    return run_command.seeded(given, seed, console)


def play(args: Values, seed: int, rate: float) -> list[dict[str, Any]]:
    """Return the figures of each policy at a rate with a seed."""
    scenario, found = at(args, rate, seed, Console(quiet=True)), []
    for chosen in scenario.policies:
        run = scenario.serve(chosen)
        numbers = run_command.figures_of(args, run, scenario.rows, chosen, seed, brief=True)
        numbers |= {
            "load": f"rate:{rate:g}",
            "value": rate,
            "repeat": seed,
            "overloaded": figures.is_overloaded(numbers, numbers["e2els"]),
        }
        found.append({name: value for name, value in numbers.items() if name not in PER_REQUEST})
    return found


def serve_all(args: Values, console: Console, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the figures of all runs, all rates of one seed after another, from one process a core.

    After Ctrl-C there are no more, and KeyboardInterrupt is raised.
    """
    cases = [*product(seeds, sorted(set(args.rates)))]
    jobs = min(args.jobs or cores(), len(cases))
    # A forked process has the classes of a notebook, which no other could import.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(args,))
    # Workers are forked here, before the thread of the progress bar.
    found = (play(args, *case) for case in cases) if jobs == 1 else pool.map(_play, *zip(*cases))
    done = 0
    try:
        with counted(console, len(cases) * len(args.policies), "runs") as progress:
            for numbers in chain.from_iterable(found):
                done += 1
                progress(done)
                yield numbers
    except BrokenProcessPool as error:
        raise RuntimeError("a process that served requests has ended. See above, or use --jobs 1") from error
    except (HookTimeout, KeyboardInterrupt):
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():  # they would go on with what they have been given
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_asked: Values


def _begin(args: Values) -> None:
    """Begin a worker, which the parent ends after Ctrl-C."""
    global _asked
    _asked = args
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hook_limit.begin()


def _play(seed: int, rate: float) -> list[dict[str, Any]]:
    return play(_asked, seed, rate)

"""Runs and sweeps from Python, with results as rows: what `./eb simulate run` and `sweep` do.

    from simulate import run, sweep

    results = run(["dynamic", Mine], trace="my.csv", rate=4, seeds=range(5))

Options are those of the commands, with underscores and without dashes: `max_batch_size=8, slo=[2, 10],
policy_option={"guard": 1}`. This module must not know how a run is served or drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import policies
from client.report import store, summary
from scheduling.policy import Policy
from simulate.commands import run as run_command
from simulate.commands import sweep as sweep_command
from simulate.commands.arguments import Sections
from simulate.hook_limit import limited
from simulate.result import outcome
from terminal.console import say
from terminal.options import Command, UsageError, Values, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Policies = str | Path | type[Policy] | Sequence[str | Path | type[Policy]]
NOT_HERE = {"out", "no_plots", "no_records", "save_trace", "seed", "repeats", "blame", "program"}
# A forked process knows the classes of a notebook, and does not run a script again to find them.
FORKS = "fork" if sys.platform == "linux" else "spawn"
FIGURES = (
    *(f"{part}_{name}_ms" for name in ("ttft", "itl", "tpot", "e2el") for part in ("mean", "p50", "p99")),
    "output_throughput", "request_throughput", "request_goodput",
)  # fmt: skip


@dataclass
class Results:
    """The runs of an experiment; `runs` are the objects that the command line prints as JSON.

    `swept` are the rates of a sweep, which does not keep what was `served`: the requests and steps of each run.
    """

    runs: list[dict[str, Any]]
    swept: dict[str, Any] | None = None
    served: Sequence[run_command.Served] = ()

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        """A flat row for each request of each run; docs/python.md has the columns and units."""
        return [
            _labels(each.numbers) | store.row(outcome(i, seq, each.run, {}))
            for each in self._kept()
            for i, seq in enumerate(each.run.sequences)
        ]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """A flat row for each step of each run, which is served again for it; docs/python.md has the columns and units."""
        return [
            {
                **_labels(each.numbers), "step": step.n, "start_s": step.t - again.began, "duration_s": step.seconds,
                "batch_size": step.batch_size, "tokens": step.tokens, "waiting": step.queue, "joined": len(step.joined),
                "left": len(step.left), "preempted": len(step.preempted), **step.slot_steps._asdict(),
                "pages_used": step.pages_used, "pages_total": step.pages_total,
            }
            for each in self._kept()
            for again in [each.again()]
            for step in again.iterations
        ]  # fmt: skip

    def summary(self) -> list[dict[str, Any]]:
        """Return a flat row for each policy and rate: means over the seeds, and `_low` and `_high` of the 95 % interval.

        The keys are those of `runs`, which name the units; throughputs are per second. An interval is of three seeds or
        more, or within a single run.
        """
        rows = []
        for policy, rate in dict.fromkeys((run["policy"], run["request_rate"]) for run in self.runs):
            some = [run for run in self.runs if (run["policy"], run["request_rate"]) == (policy, rate)]
            row = {"policy": policy, "rate": float(rate), "runs": len(some)}
            for name in FIGURES:
                low, high = summary.spread(some, name) or (None, None)
                row |= {name: summary.average(some, name), f"{name}_low": low, f"{name}_high": high}
            rows.append(row)
        return rows

    def plot(self) -> Figure:
        """Return a matplotlib figure: of a sweep the curves over the rate, of a run the times of its requests."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        from client.report import album, plots_requests, plots_sweep

        class Plot(Figure):
            def _repr_png_(self) -> bytes:
                """Return the picture that a notebook shows."""
                file = BytesIO()
                self.savefig(file, format="png", dpi=album.DPI)
                return file.getvalue()

        drawn = album.Album(store.Results(Path(), {"runs": self.runs, "sweep": self.swept}, []))
        figure = Plot(figsize=(9.6, 5.6) if self.swept else (9.6, 3.2))
        FigureCanvasAgg(figure)
        if self.swept:
            plots_sweep.panels(drawn, [*figure.subplots(2, 3).flat])
        else:
            labels = {"ttft_s": "TTFT (s)", "tpot_s": "TPOT (s)", "latency_s": "latency (s)"}
            for axes, (column, label) in zip(figure.subplots(1, 3), labels.items()):
                known = [(row["policy"], row[column]) for row in self.requests if row[column] is not None]
                times = {p: [time for policy, time in known if policy == p] for p in drawn.results.policies}
                plots_requests.shares(axes, drawn, times)
                album.finish(axes, label, "requests (%)")
        figure.tight_layout(rect=(0, album.LEGEND / 2 if figure.legends else 0, 1, 1))
        return figure

    def _kept(self) -> Sequence[run_command.Served]:
        if not self.served:
            raise ValueError("a sweep keeps neither requests nor steps. Use run(..., rate=RATE)")
        return self.served


def run(policy: Policies, *, seeds: Iterable[int] = (0,), progress: bool = False, **options: Any) -> Results:
    """Serve the same requests with each policy, once for each seed; ValueError for a wrong option.

    A policy is a name, the path of a file, or a class. With `progress`, print what the command line does.
    """
    args = _read("run", run_command.options(), policy, seeds, options)
    with limited():
        served = run_command.serve_all(args, Console(stderr=True, quiet=not progress), args.seeds)
    return Results([store.short(each.numbers) for each in served], served=served)


def sweep(
    policy: Policies, *, rates: Iterable[float], seeds: Iterable[int] = range(5), progress: bool = True, **options: Any
) -> Results:
    """Serve each rate (requests per second) with each policy, once for each seed, in one process a core.

    An interrupt, such as that of a notebook, ends it with the runs that are done.
    """
    args = _read("sweep", sweep_command.options(), policy, seeds, {**options, "rates": [*rates]})
    console = Console(stderr=True, quiet=not progress)
    runs: list[dict[str, Any]] = []
    with limited():
        run_command.seeded(args, args.seed, console, args.rates[0])
        try:
            for numbers in sweep_command.serve_all(args, console, args.seeds, FORKS):
                runs.append(numbers)
        except KeyboardInterrupt:
            say(console, f"interrupted: {len(runs)} runs are done")
    return Results(runs, sweep_command.of_sweep(args, runs))


def _labels(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {"policy": numbers["policy"], "rate": float(numbers["request_rate"]), "seed": numbers["seed"]}


def _read(name: str, sections: Sections, policy: Policies, seeds: Iterable[int], options: Mapping[str, Any]) -> Values:
    """Return the options as the command line reads them."""
    if refused := sorted(NOT_HERE & options.keys()):
        raise UsageError(f"{refused[0]} is an option of the command line. Use seeds, or ./eb simulate {name}")
    some = policy if isinstance(policy, list | tuple) else [policy]
    words = [policies.named(each) if isinstance(each, type) else str(each) for each in some]
    for option, value in options.items():
        if isinstance(value, Mapping):
            value = ",".join(f"{key}={each}" for key, each in value.items())
        values = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        if value is not None and value is not False:
            words += [f"--{option.replace('_', '-')}", *(str(each) for each in values if each is not True)]
    args = read(Command(f"./eb simulate {name}", "", sections), words)
    args.seeds = [*seeds]
    args.seed, args.repeats = args.seeds[0], len(args.seeds)
    return args

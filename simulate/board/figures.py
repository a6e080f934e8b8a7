"""A published figure: two runs, what is measured in both, and how their ratio compares with the published one.

A new figure is a new section of `papers.ini`, whose keys are the fields of `Figure`. The runs are command lines of `./eb
simulate run`, or of `./eb simulate plan` where the paper reports the highest rate within limits.
"""

from __future__ import annotations

import math
import shlex
from configparser import ConfigParser
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from simulate.__main__ import build_command
from simulate.board import loads
from simulate.commands.inputs import make_scenario
from simulate.commands.plan import limits_of
from simulate.fleet import plan
from simulate.result import by_hint
from simulate.simulator import Run
from terminal.options import read

TABLE = Path(__file__).with_name("papers.ini")
CLOSE = 0.15  # of our mean: a published factor that agrees
RESAMPLED = 10_000  # draws of as many seeds: bootstrap
QUICK, FEWEST = 0.1, 40  # the share of the requests, and how many at least


@dataclass(frozen=True)
class Figure:
    """A published factor, or the bounds of several: `metric` of `ours` as a multiple of that of `beside`.

    `metric` is "capacity", "tokens/s", "deadlines" (the share that is met), "served:CLIENT" (its share of the answers until the
    last arrival), or a statistic of a measure, as in p99:ttft. `options` are those of both runs, and `load` requests that no
    workload has.
    """

    name: str
    says: str
    published: tuple[float, ...]
    metric: str
    ours: str
    beside: str
    options: str
    differs: str
    load: str = ""

    @property
    def paper(self) -> str:
        return self.name.partition("/")[0]

    @property
    def policy(self) -> str:
        return self.ours.split()[0]

    @property
    def command(self) -> str:
        """The command of ./eb simulate that makes the runs."""
        return "plan" if self.metric == "capacity" else "run"

    def value(self, run: str, seed: int, quick: bool) -> float:
        """Return the metric of a run with this seed."""
        argv = [*shlex.split(f"{run} {self.options}"), "--seed", str(seed)]
        args = read(build_command(self.command), argv, {})
        args.num = max(round(args.num * QUICK), min(FEWEST, args.num)) if quick else args.num
        planned = self.command == "plan"
        scenario = make_scenario(args, Console(quiet=True), reported=("client", "deadline"), unit=planned)
        if self.load:
            rate = 1.0 if planned else math.inf if args.arrivals == "burst" else args.rate
            scenario = replace(scenario, rows=loads.draw(self.load, args.num, rate, seed))
        if planned:
            return plan.capacity(scenario, scenario.policies[0], limits_of(args)).low
        engine = replace(scenario.engine, evict=args.evict[0])
        return measure(self.metric, replace(scenario, engine=engine).serve(scenario.policies[0]))


def measure(metric: str, run: Run) -> float:
    """Return the metric of a run."""
    statistic, _, kind = metric.partition(":")
    if metric == "tokens/s":
        return float(run.tokens.sum()) / run.makespan
    if metric == "deadlines":
        return float(by_hint(run)["deadlines_met"])
    if statistic == "served":
        last = max(seq.arrived_at for seq in run.sequences)
        clients = [seq.client for seq in run.done if (seq.finished_at or 0.0) <= last]
        return clients.count(kind) / max(1, len(clients))
    return plan.Limit(kind, statistic, 0.0).value(run, 0)


def play(figure: Figure, seed: int, quick: bool) -> float:
    """Return the factor with one seed."""
    mine, other = (figure.value(run, seed, quick) for run in (figure.ours, figure.beside))
    return mine / other


class Result(NamedTuple):
    """Our factor, the geometric mean over seeds, the ends of its 95 % interval, and how it compares with the published one."""

    mean: float
    low: float
    high: float
    verdict: str


def judge(published: tuple[float, ...], factors: list[float]) -> Result:
    """Compare the factors of several seeds with the published one, or with the nearest between the published bounds."""
    logs = np.log(factors)
    means = np.random.default_rng(0).choice(logs, (RESAMPLED, len(logs))).mean(axis=1)
    mean, low, high = np.exp([logs.mean(), *np.quantile(means, (0.025, 0.975))]).tolist()
    nearest = min(max(mean, published[0]), published[-1])
    if low <= nearest <= high or abs(nearest / mean - 1) <= CLOSE:
        verdict = "agrees"
    elif (low > 1 and published[0] >= 1) or (high < 1 and published[-1] <= 1):
        verdict = "direction only"
    else:
        verdict = "does not reproduce"
    return Result(mean, low, high, verdict)


def read_table() -> list[Figure]:
    """Return the figures of the table."""
    table, figures = ConfigParser(interpolation=None), []
    table.read_string(TABLE.read_text("utf-8"))
    for name in table.sections():
        cells = {key: " ".join(value.split()) for key, value in table[name].items()}
        bounds = tuple(map(float, cells.pop("published").split()))
        figures.append(Figure(name, published=bounds, **cells))
    return figures

"""Raise the rate, or the number of users, of live servers until they are saturated.

It stops by itself. A rate is too high if requests complete at less than half of it, or at less than 0.9 of it while the
later half takes much longer than the first, at two rates in a row. More users are useless if two steps gain less than
5 % each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console

from terminal.console import leave, say
from terminal.options import POSITIVE, Argument, Choice, Command, Option, Parameter, Values

from . import ending, flags
from .display import guarded
from .experiment import Experiment, complete, name_of, without_key
from .report.figures import is_overloaded
from .runs import draw
from .send.target import Target
from .workloads.arrivals import Arrivals
from .workloads.corpus import USUAL_CONTEXT

GAIN = 1.05
MAX_STEPS = 12
SECONDS = 20.0
MIN_REQUESTS = 30
OVER = {"rate": "requests per second, doubled until saturation", "users": "users of a closed loop"}
VALUES: dict[str, list[float]] = {
    "rate": [2.0**i for i in range(MAX_STEPS)], "users": [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]
}  # fmt: skip
EXAMPLES = (
    "./eb sweep static dynamic --over rate",
    "./eb sweep dynamic --over users --values 24 64 128 256",
    "./eb sweep ours=http://10.0.0.5:8500 --over rate",
)
SWEPT = [
    Option("--over", "; ".join(f"{name}: {text}" for name, text in OVER.items()), Choice(OVER, "WHAT"), default="rate"),
    Option("--values", "values to use instead of the usual ones", POSITIVE, metavar="X", several=True),
    Option("--seconds", "duration of each rate", POSITIVE, metavar="S", default=SECONDS),
]  # fmt: skip


def build_command() -> Command:
    what = Argument("what", "policies, or [NAME=]URL of running servers", nargs=-1, default=[])
    sections: dict[str, Sequence[Parameter]] = {
        "arguments": [what], "sweep": [*SWEPT, flags.PORT], "workload": flags.sent("as many as each step needs"), "servers to start": flags.STARTED,
        "requests": flags.ASKED, "output": flags.OUTPUT,
    }  # fmt: skip
    first = (__doc__ or "").partition("\n")[0]
    intro = f"{first}\n\nBy default: static and dynamic with bard. ./eb simulate sweep needs no servers."
    return flags.command("./eb sweep", intro, sections, EXAMPLES)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Values:
    """Read the command line."""
    args = flags.parse(build_command(), argv, environ)
    complete(args, ("static", "dynamic"))
    args.model, args.load_format = args.model or "bard", args.load_format or "auto"
    args.workload = args.workload or "original"
    args.sweep_values = sorted(args.values or VALUES[args.over])
    args.load, args.repeats = [pace(args.over, value) for value in args.sweep_values], 1
    flags.check_limits(args)
    return args


def pace(over: str, value: float) -> Arrivals:
    """Return the load of a value."""
    return Arrivals("poisson" if over == "rate" else "closed", value)


def saturated(over: str, history: Sequence[Mapping[str, Any]], e2els: Sequence[float | None]) -> bool:
    """Return whether the server is saturated; `e2els` are the latencies of the last run, in order of arrival."""
    if over == "rate":
        return is_overloaded(history[-1], e2els)
    rates = [run["output_throughput"] or 0.0 for run in history[-3:]]
    return len(rates) == 3 and all(later < GAIN * rate for rate, later in pairwise(rates))


class Sweep(Experiment):
    """Sweeps one policy after another."""

    def steps(self, name: str, target: Target, progress: str) -> None:
        """Run the values on one server until it is saturated."""
        flags, over = self.flags, self.flags.over
        history: list[dict[str, Any]] = []
        limit: float | None = None
        for place, value in enumerate(flags.sweep_values):
            # Another seed for each run on a server, or a run would find the prompts of those before it in the cache.
            plan = draw(flags, flags.workload, self.count(value), pace(over, value), flags.seed + place, USUAL_CONTEXT)
            labels = {"policy": name, "load": f"{over}:{value:g}", "repeat": 0, "value": value}
            say(self.console, f"{progress}{name}, {over} {value:g}: {len(plan.planned)} requests")
            warmup = 0 if history else self.warm_up(target, plan)
            numbers = self.one(labels, target, plan, warmup)
            history.append(numbers)
            if self.interrupted:
                return
            if not saturated(over, history, numbers["e2els"]):
                limit = None
            elif limit is not None or over != "rate":
                self.stop(name, value if limit is None else limit)
                if not flags.values:
                    return
            else:
                limit = value  # an outlier, unless the next rate is too high as well

    def stop(self, name: str, value: float) -> None:
        """Record where a policy is saturated."""
        known = self.store.summary["sweep"]["saturation"]
        if name not in known:
            known[name] = value
            self.store.save()
            say(self.console, f"{name} is saturated at {self.flags.over} {value:g}")

    def count(self, value: float) -> int:
        """Return the number of requests of a step."""
        flags = self.flags
        if flags.numsamples:
            return int(flags.numsamples)
        if flags.over == "rate":
            seconds: float = flags.seconds
            return max(MIN_REQUESTS, math.ceil(value * seconds))
        return max(MIN_REQUESTS, math.ceil(2 * value))


@guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Sweep every policy; print and write the results, and return the exit code."""
    args = read(argv, environ)
    sweep = Sweep(args, console, without_key("sweep", argv))
    sweep.store.summary["sweep"] = {"over": args.over, "values": args.sweep_values, "saturation": {}}
    say(console, f"{', '.join(map(name_of, args.what))} over {args.over}, seed {args.seed}")
    try:
        sweep.each(sweep.steps, args.what)
    finally:
        sweep.store.close()
        ending.finish(sweep.store.folder, console, not args.no_plots)
    return sweep.exit_code()


if __name__ == "__main__":
    leave(main())

"""Sweep one value until the server is saturated: rates, users, slots, lengths, cache size, or draft tokens.

    python -m client.sweep static dynamic --over rate
    python -m client.sweep dynamic --over users --values 24 64 128 256
    python -m client.sweep ours=http://10.0.0.5:8500 --over rate

It stops by itself. A rate is too high if requests complete at less than half of it, or at less than 0.9 of it while the
later half takes much longer than the first, at two rates in a row. More users are useless if two steps gain less than
5 % each.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from terminal.console import leave, say
from terminal.option_types import Type
from terminal.options import POSITIVE, Argument, Choice, Command, Number, Option, Parameter, UsageError, Values

from . import ending, flags
from .display import guarded
from .experiment import Experiment, check_names, name_of, server_flags, without_key
from .report.figures import is_overloaded
from .report.tables import AUTO, swept
from .runs import draw
from .send import servers
from .send.target import Target
from .workloads.arrivals import Arrivals
from .workloads.corpus import USUAL_CONTEXT

GAIN = 1.05
MAX_STEPS = 12
SECONDS = 20.0
MIN_REQUESTS = 30
MOST_DRAFTS = 8  # that a server takes


class Swept(Type):
    """A number, or `auto` draft tokens."""

    name = "X"
    wanted = "a number of at least 0, or auto"

    def parse(self, value: Any) -> float:
        number = AUTO if value == "auto" else float(value)
        if not 0 <= number < math.inf:
            raise ValueError
        return number


@dataclass(frozen=True, slots=True)
class Axis:
    """A swept value: its usual values, and the load, the workload and the server's flags for one."""

    help: str
    values: tuple[float, ...]
    pace: Callable[[float], Arrivals]
    workload: str | None = None
    server: Callable[[float], list[str]] = lambda value: []


BURST = Arrivals("burst")
AXES: dict[str, Axis] = {
    "rate": Axis(
        "requests per second, doubled until saturation",
        tuple(2.0**i for i in range(MAX_STEPS)),
        lambda rate: Arrivals("poisson", rate),
    ),
    "users": Axis(
        "users of a closed loop", (1, 2, 4, 8, 16, 24, 32, 64, 128, 256),
        lambda users: Arrivals("closed", users),
    ),
    "batch": Axis(
        "--max-batch-size of the server, in a burst", (1, 2, 4, 8, 16, 32, 64),
        lambda _: BURST, server=lambda n: ["--max-batch-size", f"{n:.0f}"],
    ),
    "cache": Axis(
        "MiB of KV pages, with shared prefixes at two requests per second", (8, 16, 32, 64, 128, 256),
        lambda _: Arrivals("poisson", 2.0), "shared-prefix:20:256", lambda mib: ["--kv-memory", f"{mib:.0f}M"],
    ),
    "pinned": Axis(
        "--pinned-pages of a server whose --pinned-prefixes is in --server, in a burst", (0, 16, 64, 256),
        lambda _: BURST, server=lambda n: ["--pinned-pages", f"{n:.0f}"],
    ),
    "speculate": Axis(
        "draft tokens of a request in a step, 0 to 8 or auto, for the users of a closed loop (--users)", (0, 2, 8, AUTO),
        lambda _: Arrivals("closed", 1),
        server=lambda n: ["--speculate", "auto", "--drafts", swept("speculate", n)] if n else ["--speculate", "off"],
    ),
}  # fmt: skip
STARTING = ("batch", "cache", "pinned", "speculate")  # need a server for each value
EXAMPLES = (
    "python -m client.sweep static dynamic --over rate",
    "python -m client.sweep dynamic --over users --values 24 64 128 256",
    "python -m client.sweep ours=http://10.0.0.5:8500 --over rate",
)
SWEPT = [
    Option(
        "--over", "; ".join(f"{name}: {axis.help}" for name, axis in AXES.items()), Choice(AXES, "WHAT"),
        default="rate",
    ),
    Option("--values", "values to use instead of the usual ones", Swept(), metavar="X", several=True),
    Option("--users", "with --over speculate: users of the closed loop", Number(1), default=1),
    Option("--seconds", "duration of each rate", POSITIVE, metavar="S", default=SECONDS),
]  # fmt: skip


def build_command() -> Command:
    what = Argument("what", "policies, or name=URL of running servers", nargs=-1, default=[])
    sections: dict[str, Sequence[Parameter]] = {
        "arguments": [what], "sweep": SWEPT, "workload": flags.sent("as many as each step needs"), "servers to start": flags.STARTED,
        "requests": flags.ASKED, "output": flags.OUTPUT,
    }  # fmt: skip
    intro = (__doc__ or "").partition("\n")[0] + "\n\nBy default: static and dynamic with bard."
    return flags.command("python -m client.sweep", intro, sections, EXAMPLES)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Values:
    """Read the command line."""
    args = flags.parse(build_command(), argv, environ)
    args.what = args.what or ["static", "dynamic"]
    check_names(args.what)
    args.model, args.load_format = args.model or "bard", args.load_format or "auto"
    axis = AXES[args.over]
    args.workload = axis.workload or args.workload or "original"
    if args.over in STARTING and any("=http" in word for word in args.what):
        raise UsageError(f"--over {args.over} starts its own servers. Use policies instead of addresses")
    args.sweep_values = sorted(args.values) if args.values else list(axis.values)
    check_values(args)
    args.load, args.repeats = [pace(args, value) for value in args.sweep_values], 1
    flags.check_limits(args)
    return args


def check_values(args: Values) -> None:
    """Reject values that the swept setting cannot have."""
    if args.over == "speculate":
        wrong = [
            value for value in args.sweep_values if value != AUTO and not (value <= MOST_DRAFTS and value.is_integer())
        ]
        remedy = f"a whole number from 0 to {MOST_DRAFTS}, or auto"
    else:
        wrong = [value for value in args.sweep_values if value <= 0 and args.over != "pinned"]
        remedy = "a number above 0"
        if args.is_given("users"):
            raise UsageError(
                f"--users {args.users} has no effect. Use --over speculate, or --over users --values {args.users}"
            )
    if wrong:
        raise UsageError(f"--values {swept(args.over, wrong[0])} with --over {args.over}. Use {remedy}")


def pace(args: Values, value: float) -> Arrivals:
    """Return the load of a value."""
    return Arrivals("closed", args.users) if args.over == "speculate" else AXES[args.over].pace(value)


def saturated(over: str, history: Sequence[Mapping[str, Any]], e2els: Sequence[float | None]) -> bool:
    """Return whether the server is saturated; `e2els` are the latencies of the last run, in order of arrival."""
    last = history[-1]
    if over == "rate":
        return is_overloaded(last, e2els)
    if over == "users" and len(history) > 2:
        three = [run["output_throughput"] or 0.0 for run in history[-3:]]
        return three[1] < GAIN * three[0] and three[2] < GAIN * three[1]
    return False


class Sweep(Experiment):
    """Sweeps one policy after another."""

    def policy(self, word: str, progress: str) -> None:
        """Run one policy with the values until it is saturated; raise ServerUnreachable if it does not start."""
        values: list[float] = self.flags.sweep_values
        # A value that is a flag of the server needs a server of its own.
        groups = [[value] for value in values] if self.flags.over in STARTING else [values]
        for group in groups:
            with self.reached(word, AXES[self.flags.over].server(group[0])) as target:
                self.steps(name_of(word), target, group, progress)
            if self.interrupted:
                return

    def steps(self, name: str, target: Target, values: Sequence[float], progress: str) -> None:
        """Run the values on one server."""
        flags, over = self.flags, self.flags.over
        history: list[dict[str, Any]] = []
        limit: float | None = None
        for place, value in enumerate(values):
            # Another seed for each run on a server, or a run would find the prompts of those before it in the cache.
            plan = draw(flags, flags.workload, self.count(value), pace(flags, value), flags.seed + place, USUAL_CONTEXT)
            labels = {"policy": name, "load": f"{over}:{swept(over, value)}", "repeat": 0, "value": value}
            say(self.console, f"{progress}{name}, {over} {swept(over, value)}: {len(plan.planned)} requests")
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
        if flags.over == "speculate":
            return max(MIN_REQUESTS, 2 * int(flags.users))
        return max(MIN_REQUESTS, math.ceil(2 * value)) if flags.over == "users" else 64


def run(args: Values, console: Console, command: str) -> int:
    """Sweep every policy; print and write the results."""
    values = args.sweep_values if args.over in STARTING else args.sweep_values[:1]
    servers.check(
        [word, *server_flags(args), *AXES[args.over].server(value)]
        for word in args.what
        for value in values
        if "=http" not in word
    )
    sweep = Sweep(args, console, command)
    sweep.store.summary["sweep"] = {"over": args.over, "values": args.sweep_values, "saturation": {}}
    say(console, f"{', '.join(map(name_of, args.what))} over {args.over}, seed {args.seed}")
    try:
        sweep.each(sweep.policy, args.what)
    finally:
        sweep.store.close()
        ending.finish(sweep.store.folder, console, not args.no_plots)
    return sweep.exit_code()


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the sweep and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command(console: Console) -> int:
        args = read(arguments, os.environ if environ is None else environ)
        return run(args, console, without_key("client.sweep", arguments))

    return guarded(command, lambda: None)


if __name__ == "__main__":
    leave(main())

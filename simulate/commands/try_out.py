"""Try a policy file within seconds: the laws, and a run beside the loop that it derives from."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import policies
from client.report.measure import statistics_ms
from scheduling.policy import Policy
from simulate.commands import run as run_command
from simulate.commands.arguments import Sections
from simulate.commands.inputs import make_scenario
from simulate.laws.check import CASES, LARGE_CASES, Verdict, check
from simulate.laws.laws import Broken
from simulate.laws.trial import try_case
from terminal.console import say, table_of
from terminal.options import FOLDER, POSITIVE, Argument, Command, Number, Option, UsageError, Values, read
from terminal.progress import counted

HINTS = ["--clients", "4", "--priorities", "3", "--slo", "2", "10"]  # for whatever an order goes by
ARENA = ["--only", "--seeds", "1", "--num", "200", "--jobs", "1"]
QUICK = (600, 2)  # small and large cases, which find all planted faults of our tests; a report has all cases
FIGURES = {"mean latency": "mean_e2el_ms", "p99 latency": "p99_e2el_ms", "mean TTFT": "mean_ttft_ms"}
NOTE = "Exit status: 0 when every law is kept, 1 when one is broken, 2 for a wrong command line."


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [Argument("policy", "file of a policy or of an order, or loop+file", required=True)],
        "run beside the loop that it derives from": [
            Option("--workload", "a workload of the client", default="short-long"),
            Option("--rate", "requests per second", POSITIVE, default=12.0),
            Option("--num", "number of requests", Number(10), default=1000),
            Option("--max-batch-size", "slots", Number(1), default=8),
            Option("--seed", "random seed", Number(0), default=0),
        ],
        "report": [
            Option(
                "--out",
                "try all cases of `check`, find lower bounds, draw plots, rank, and report into this folder",
                FOLDER,
            )
        ],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Check the laws; if all are kept, run the policy and its loop, and report on them if that is asked for."""
    shipped = {*policies.names(), *policies.order_names()}
    if shipped.issuperset(args.policy.split("+")):
        raise UsageError(f"{args.policy!r} is a policy of this project. Use a file, or ./eb simulate run {args.policy}")
    if Path(args.policy).is_dir():
        raise UsageError(f"{args.policy!r} is a folder. Name the file of a policy, as in ./eb try mine.py")
    name = policies.complete(args.policy)
    policy = policies.get_policy(name, args.max_batch_size)
    base = base_of(policy)
    if policy.name == base:
        raise UsageError(f"{args.policy!r} has the name of the loop that it derives from. Rename the file")
    verdict = judge(name, *((CASES, LARGE_CASES) if args.out else QUICK))
    good = verdict.broken is None
    told: dict[str, Any] = {"policy": policy.name, "base": base, "good": good, "verdict": str(verdict)}
    if verdict.case is not None:
        with suppress(Broken):  # what hooks print in it is shown
            try_case(policies.policy_maker(name), verdict.case, twice=False)
    say(console, str(verdict))
    if not good:
        return told
    folder = args.out or Path("results") / f"{datetime.now():%Y%m%d-%H%M%S}-try-{policy.name}"
    slots = max(policy.max_batch_size, policies.get_policy(base, args.max_batch_size).max_batch_size)
    given = as_run(args, base, name, slots)
    if args.out:
        told |= report(given, folder, console)
    else:
        told["runs"] = run_both(given, folder, console)
        say(console, f"more: ./eb try {args.policy} --out report; serve it: ./eb serve {args.policy}")
    say(console, compared(*told["runs"]))
    return told


def judge(name: str, cases: int, large: int) -> Verdict:
    """Return whether the policy keeps the laws; what its hooks print in thousands of cases is nothing to read."""
    # A bar would take what hooks print to the terminal, all of it, so progress is lines.
    plain = Console(stderr=True, force_terminal=False)
    with open(os.devnull, "w") as none, redirect_stdout(none), counted(plain, cases + large, "cases tested") as done:
        return check(name, cases, large=large, progress=done)


def base_of(policy: Policy) -> str:
    """Return the name of the loop that a policy derives from."""
    for cls in type(policy).__mro__:
        package, _, module = cls.__module__.rpartition(".")
        if package == "policies":
            return module.replace("_", "-")
    return "dynamic"  # beside which a loop runs that derives from none of this project


def as_run(args: Values, base: str, name: str, slots: int) -> Values:
    """Return what `simulate run` reads for both."""
    line = [base, name, "--workload", args.workload, "--num", str(args.num), "--max-batch-size", str(slots)]
    line += ["--seed", str(args.seed)]
    if args.is_given("rate") or not args.workload.startswith("trace:"):
        line += ["--rate", f"{args.rate:g}"]
    line += [] if args.is_given("workload") else HINTS
    given = read(Command("./eb simulate run", "", run_command.options()), line)
    given.command_line = shlex.join(["./eb", "simulate", "run", *line])
    return given


def run_both(given: Values, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Serve the requests with both policies and print a table; return the figures of each."""
    scenario = make_scenario(given, console, reported=("client", "deadline"))
    with printed(folder / "printed.txt", console):
        runs = [scenario.serve(chosen) for chosen in scenario.policies]
    found: list[dict[str, Any]] = [
        {"policy": run.policy, **statistics_ms("e2el", run.latency), **statistics_ms("ttft", run.ttft)} for run in runs
    ]
    rows = [[n["policy"], *("-" if n[key] is None else f"{n[key]:,.0f}" for key in FIGURES.values())] for n in found]
    title = f"{given.workload}, {runs[0].requests:,} requests, simulated; times in ms"
    console.print(table_of(title, ("policy", *FIGURES), rows, no_wrap=True))
    return found


def report(given: Values, folder: Path, console: Console) -> dict[str, Any]:
    """Run both as `simulate run` does, draw their page and rank them in the arena; return what was found."""
    # scipy, which these need, takes as long to load as all the rest
    from simulate.arena.arena import REFERENCE
    from simulate.commands import arena

    given.out = folder
    with printed(folder / "printed.txt", console):
        told = run_command.run(given, console)
    others = [name for name in given.policies if name != REFERENCE]
    given = read(Command("./eb simulate arena", "", arena.options()), [*others, *ARENA])
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        told["arena"] = arena.run(given, Console(stderr=True, force_terminal=False))["ranking"]
    if (page := folder / "report.html").is_file():
        told["report"] = str(page)
    return told


def compared(base: dict[str, Any], mine: dict[str, Any]) -> str:
    """Return the verdict in one line: what is sure, and how the latencies differ from those of the loop."""
    names = {"latency": "mean_e2el_ms", "p99": "p99_e2el_ms", "TTFT": "mean_ttft_ms"}
    words = (f"{what} {mine[key] / base[key] - 1:+.0%}" for what, key in names.items() if mine[key] and base[key])
    return f"{mine['policy']} loses no request; beside {base['policy']}: {', '.join(words)}"


@contextmanager
def printed(path: Path, console: Console) -> Iterator[None]:
    """Write what hooks print meanwhile into a file, and say where it is."""
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            yield
    finally:  # what a hook printed before it failed, too
        if text.getvalue():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.getvalue(), encoding="utf-8")
            say(console, f"note: what hooks printed is in {path}")

"""Try a policy file: the laws, a run beside the loop that it derives from, the arena, and a page with plots."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import policies
from client import ending
from scheduling.policy import Policy
from simulate.arena.arena import REFERENCE, WORKLOADS
from simulate.commands import arena
from simulate.commands import run as run_command
from simulate.commands.arguments import Sections
from simulate.laws.check import CASES, LARGE_CASES, check
from simulate.laws.laws import Broken
from simulate.laws.trial import try_case
from terminal.console import say
from terminal.options import FOLDER, POSITIVE, Argument, Command, Number, Option, UsageError, Values, read
from terminal.progress import counted

HINTS = ["--clients", "4", "--priorities", "3", "--slo", "2", "10"]  # for whatever an order goes by
ARENA = ["--only", "--seeds", "1", "--num", "200", "--jobs", "1"]
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
        "result": [Option("--out", "folder for the report (default: a new one in results/)", FOLDER)],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Check the laws; if all are kept, run the policy and its loop and draw the page."""
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
    say(console, f"1 of 3: the laws, in {CASES:,} small and {LARGE_CASES} large cases")
    # A bar would take what hooks print to the terminal, all of it, so progress is lines.
    plain = Console(stderr=True, force_terminal=False)
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        counted(plain, CASES + LARGE_CASES, "cases tested") as progress,
    ):
        verdict = check(name, CASES, large=LARGE_CASES, progress=progress)
    say(console, str(verdict))
    told: dict[str, Any] = {
        "policy": policy.name,
        "base": base,
        "good": verdict.broken is None,
        "verdict": str(verdict),
    }
    if verdict.broken is not None:
        if verdict.case is not None:
            with suppress(Broken):  # what hooks print in it is shown
                try_case(policies.policy_maker(name), verdict.case, twice=False)
        return told
    say(console, f"2 of 3: {policy.name} beside {base}")
    folder = args.out or Path("results") / f"{datetime.now():%Y%m%d-%H%M%S}-try-{policy.name}"
    slots = max(policy.max_batch_size, policies.get_policy(base, args.max_batch_size).max_batch_size)
    told["runs"] = run_both(run_line(args, base, name, slots), folder, console)
    say(console, compared(*told["runs"]))
    say(console, f"3 of 3: the arena, {len(WORKLOADS)} workloads")
    others = dict.fromkeys([name, base])
    given = read(Command("./eb simulate arena", "", arena.options()), [*(n for n in others if n != REFERENCE), *ARENA])
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        told["arena"] = arena.run(given, plain)["ranking"]
    page = folder / "report.html"
    if page.is_file():
        told["report"] = str(page)
    say(
        console,
        f"next: other requests with ./eb simulate run {base} {name} --workload NAME, or a server with ./eb serve {name}",
    )
    return told


def base_of(policy: Policy) -> str:
    """Return the name of the loop that a policy derives from."""
    for cls in type(policy).__mro__:
        package, _, module = cls.__module__.rpartition(".")
        if package == "policies":
            return module.replace("_", "-")
    return REFERENCE


def run_line(args: Values, base: str, name: str, slots: int) -> list[str]:
    """Return the arguments of `simulate run` for both."""
    line = [base, name, "--workload", args.workload, "--num", str(args.num), "--max-batch-size", str(slots)]
    line += ["--seed", str(args.seed)]
    if args.is_given("rate") or not args.workload.startswith("trace:"):
        line += ["--rate", f"{args.rate:g}"]
    return line if args.is_given("workload") else [*line, *HINTS]


def run_both(line: list[str], folder: Path, console: Console) -> list[dict[str, Any]]:
    """Run `simulate run`, whose report is for this folder; return the result of each policy."""
    given = read(Command("./eb simulate run", "", run_command.options()), [*line, "--out", str(folder), "--no-plots"])
    given.command_line = shlex.join(["./eb", "simulate", "run", *line])
    with printed(folder / "printed.txt", console):
        runs: list[dict[str, Any]] = run_command.run(given, console)["runs"]
    say(console, "drawing the plots of the report")
    ending.draw_page(folder, console)
    return runs


def compared(base: dict[str, Any], mine: dict[str, Any]) -> str:
    """Say how the latencies of a policy differ from those of its loop."""
    figures = {"mean latency": "mean_e2el_ms", "p99 latency": "p99_e2el_ms", "mean TTFT": "mean_ttft_ms"}
    words = (f"{what} {mine[key] / base[key] - 1:+.0%}" for what, key in figures.items() if mine[key] and base[key])
    return f"{mine['policy']} beside {base['policy']}: {', '.join(words)}"


@contextmanager
def printed(path: Path, console: Console) -> Iterator[None]:
    """Write what hooks print meanwhile into a file, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file):
        yield
    if path.stat().st_size:
        say(console, f"note: what hooks printed is in {path}")
    else:
        path.unlink()

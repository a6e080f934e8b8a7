"""Search for the trace on which a policy does worst, compared with another policy or a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import policies
from simulate import workloads
from simulate.arena.adversary import MEASURES, Adversary, Duel, Finding
from simulate.commands.arguments import Sections, engine_options
from simulate.commands.inputs import make_cost
from simulate.laws.case import Case
from simulate.rows import Rows
from simulate.scenario import Chosen, EngineSize
from terminal.console import say, table_of
from terminal.options import FILE, Argument, Choice, Number, Option, UsageError, Values, read_pairs

NOTE = "The trace is a CSV file, which `run --trace` reads."


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [Argument("policy", "a policy name, loop+order, or the path of a file", required=True)],
        "engine": engine_options(kv=False, speculation=False, max_batch_size=2),
        "search": [
            Option(
                "--against", "policy to compare with; fcfs: the same loop in order of arrival (dynamic, if there is no order); bound: "
                "the lower bound of the mean latency", default="fcfs",
            ),
            Option(
                "--measure", "latency to compare; slowdown: that of the request with the largest ratio", Choice(MEASURES),
                default="mean",
            ),
            Option("--requests", "maximum number of requests", Number(1, 100), default=6),
            Option("--longest", "maximum tokens of a prompt or an answer", Number(1, 10_000), default=100),
            Option("--tries", "number of traces to try", Number(1), default=3000),
            Option("--seed", "random seed", Number(0), default=0),
            Option("--out", "file for the trace", FILE, default=Path("adversary.csv")),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Search, write the trace, and report how the file is served."""
    duel, names = make_duel(args)
    path: Path = args.out
    if path.is_dir():
        raise UsageError(f"--out is {str(path)!r}, which is a folder. Use {path / 'adversary.csv'}")
    _, case = Adversary(duel, args.requests, args.longest, args.seed).search(args.tries)
    path.write_text(as_csv(case), "utf-8")
    rows = workloads.read(path)
    found = duel.serve(rows.sequences)
    show(
        console, rows, found, names, "latency of a request" if args.measure == "slowdown" else f"{args.measure} latency"
    )
    line = f"run {names[0]} --max-batch-size {args.max_batch_size} --trace {path}"
    say(console, f"written: {path}. Serve it with any policy: ./eb simulate {line}")
    own, other = found.latencies
    return {
        "policy": names[0], "against": names[1], "measure": args.measure, "ratio": found.ratio,
        "policy_ms": 1000 * found.own, "against_ms": 1000 * found.other, "requests": len(own),
        "latency_s": own, "against_latency_s": other,
    }  # fmt: skip


def make_duel(args: Values) -> tuple[Duel, tuple[str, str]]:
    """Return the two sides and their names; --policy-option counts for the rival where it has the option."""
    values = read_pairs(args.policy_option, "--policy-option")
    cost, host = make_cost(args)
    loop, plus, _ = args.policy.partition("+")
    rival = (f"{loop}+fcfs" if plus else "dynamic") if args.against == "fcfs" else args.against
    if rival == args.policy:
        raise UsageError(f"--against {args.against} is {rival} itself. Use --against bound")
    if rival == "bound" and args.measure != "mean":
        raise UsageError(f"--measure {args.measure} has no bound. Use --measure mean, or --against fcfs")
    sides = [Chosen(args.policy, values)]
    if rival != "bound":
        policies.check_name(rival)
        known = {field["name"] for field in policies.form_of(rival)}
        sides.append(Chosen(rival, {name: value for name, value in values.items() if name in known}))
    engine = EngineSize(args.max_batch_size, args.max_tokens_per_step)
    own, *others = [partial(engine.scheduler, side) for side in sides]
    return Duel(own, others[0] if others else None, cost, host, args.measure), (args.policy, rival)


def as_csv(case: Case) -> str:
    """Return a trace as a file that `--trace` reads."""
    first = min(r.arrival for r in case.requests)
    rows = [f"{(r.arrival - first) / 1000},{len(r.prompt)},{r.output},{r.client},{r.priority}\n" for r in case.requests]
    return "".join(["arrival_s,prompt_tokens,output_tokens,client,priority\n", *rows])


def show(console: Console, rows: Rows, found: Finding, names: tuple[str, str], what: str) -> None:
    """Print a line for each request, and the ratio."""
    columns: dict[str, Sequence[Any]] = {
        "arrives, ms": [1000 * at for at in rows.at.tolist()],
        "prompt": rows.prompt.tolist(),
        "output": rows.output.tolist(),
        "client": rows.client or [],
        "priority": rows.priority or [],
        **{name: [1000 * seconds for seconds in side] for name, side in zip(names, found.latencies)},
    }
    shown = {name: cells for name, cells in columns.items() if cells}
    lines = [[cell if isinstance(cell, str) else f"{cell:,.0f}" for cell in cells] for cells in zip(*shown.values())]
    served = " and ".join(name for name in names if name in shown)
    console.print(table_of(f"the trace; latencies in ms with {served}", shown, lines, left=0))
    rival = "the bound" if names[1] == "bound" else names[1]
    words = (
        f"{names[0]}: {found.ratio:.2f} times {rival} on this trace of {len(rows.at)} request{'s' * (len(rows.at) > 1)}"
    )
    say(console, f"{words} ({what} {1000 * found.own:,.0f} ms instead of {1000 * found.other:,.0f} ms)")

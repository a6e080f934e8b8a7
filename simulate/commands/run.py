"""Serve a workload with one or more policies and report the result of each."""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from rich.console import Console

import policies
from client import ending
from client.report import figures, store, summary, tables
from client.workloads import agentic
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import blocks, result
from simulate.best import blame, program_blame, regret
from simulate.commands.arguments import Sections, arrival_options, config_of, engine_options, now, policies_argument
from simulate.commands.inputs import make_scenario
from simulate.commands.option_checks import UNLIMITED, Reasons, check_once, refuse
from simulate.rows import Rows
from simulate.scenario import Chosen, Scenario
from simulate.simulator import Run, simulate
from terminal.console import say, table_of
from terminal.options import FILE, FOLDER, POSITIVE, Choice, Number, Option, UsageError, Values
from terminal.progress import counted

LIMITS = ("ttft", "tpot", "e2el")
LIMIT_OPTIONS = [
    Option(f"--{name}", f"{name.upper()} limit in seconds, for goodput, which also counts deadlines (--slo)", POSITIVE)
    for name in LIMITS
]


@dataclass(frozen=True)
class Served:
    """A run: its figures as JSON has them, and what they were made of; `again` serves it again with records of all steps."""

    numbers: dict[str, Any]
    run: Run
    again: abc.Callable[[], Run]


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [policies_argument()],
        "engine": [
            *engine_options(),
            Option(
                "--evict",
                "with --kv-tokens: which cached page to evict first; belady knows all requests; several are compared",
                Choice(policies.eviction_names(clairvoyant=True)),
                several=True,
                default=["lru"],
            ),
        ],
        "arrivals": [
            *arrival_options(),
            Option("--repeats", "runs of each policy, with the seeds from --seed on", Number(1), default=1),
            Option(
                "--open-ended",
                "send requests without max_tokens, which join with pages for the prompt and a margin, and grow",
                None,
            ),
        ],
        "result": [
            Option("--out", "folder for the files that client.compare also writes", FOLDER),
            Option(
                "--save-trace", "file for the calls of programs, as a trace in Dynamo's agentic Mooncake form", FILE
            ),
            Option("--no-plots", "write no plots and no page", None),
            Option(
                "--blame",
                "print how much each client's requests delayed those of the others, from runs without each request; "
                f"at most {blame.MOST_REQUESTS} requests",
                None,
            ),
            Option(
                "--program", "with --blame: the program to explain, as programs.csv names it (default: the slowest)"
            ),
            Option("--no-records", "write no iterations.jsonl: much faster for long runs", None),
            *LIMIT_OPTIONS,
        ],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve one workload with each policy, once for each seed."""
    results = [served.numbers for served in serve_all(args, console, range(args.seed, args.seed + args.repeats))]
    show_runs(console, results)
    if args.out:
        finish(console, args)
    return {"runs": [{k: v for k, v in n.items() if k not in store.ARRAYS} for n in results]}


def seeded(args: Values, seed: int, console: Console, rate: float | None = None) -> Scenario[Rows]:
    """Return the scenario of a seed, and of a rate of a sweep."""
    given = Values(**{**vars(args), "seed": seed})
    if rate:
        given.rate, given.speed, given.origin = rate, 1.0, {**args.origin, "rate": "flag"}
    return make_scenario(given, console, reported=("client", "deadline"), draws_more=True, shuffles=True)


def serve_all(args: Values, console: Console, seeds: abc.Sequence[int]) -> list[Served]:
    """Return the runs of each seed, and keep them in --out; what is wrong is refused before anything runs."""
    scenario = seeded(args, seeds[0], console)
    rows = scenario.rows
    refuse(args, without_effect(args, scenario))
    check_evict(args, rows)
    if args.blame and (count := len(rows.at)) > blame.MOST_REQUESTS:
        num = max(1, blame.MOST_REQUESTS * (args.num or count) // count)  # which may count programs
        raise UsageError(f"--blame takes at most {blame.MOST_REQUESTS} requests, not {count:,}. Use --num {num}")
    if args.save_trace:
        args.save_trace.write_text("".join(agentic.lines(rows.calls or [], rows.ids or [], blocks.TOKENS)))
    folder = make_store(args, [load_of(args, rows)]) if args.out else None
    found = []
    for repeat, seed in enumerate(seeds):
        if repeat:
            scenario = seeded(args, seed, Console(quiet=True))  # its notes would be the same
        for chosen, evict in product(scenario.policies, args.evict):
            evicting = replace(scenario, engine=replace(scenario.engine, evict=evict))
            served = serve(args, console, evicting, chosen, seed)
            found.append(served)
            if folder:
                result.keep(folder, load_of(args, rows), repeat, served.run, served.numbers)
    if folder:
        folder.close()
    return found


def serve(args: Values, console: Console, scenario: Scenario[Rows], chosen: Chosen, seed: int) -> Served:
    """Serve the requests with one policy, and compare it with the lower bounds."""
    evict = scenario.engine.evict

    def fresh() -> tuple[Scheduler, list[Sequence]]:
        scheduler, sequences = scenario.fresh(chosen)
        if len(args.evict) > 1:
            scheduler.policy.name += f" {evict}"
        return scheduler, sequences

    scheduler, sequences = fresh()
    began = time.perf_counter()
    records = bool(args.out) and not args.no_records
    run = simulate(scheduler, sequences, scenario.cost, scenario.host, records=records)
    seconds = time.perf_counter() - began
    numbers = figures_of(args, run, scenario.rows, chosen, seed)
    numbers["config"]["evict"] = evict
    count, took = numbers["num_prompts"], f"{run.steps:,} steps in {seconds:.2f} s"
    pace = f"{took}, {60 * count / max(seconds, 1e-9):,.0f} requests a minute"
    name = f"{run.policy}, seed {seed}" if args.repeats > 1 else run.policy
    say(console, f"{name}: {pace}{hint_words(numbers['simulation'])}")
    numbers["simulation"] |= regret.of(run, scenario.cost, scheduler, fresh)
    each = numbers["simulation"].get("programs", {}).pop("each", [])
    if args.blame and run.loop is not None:
        numbers["simulation"]["program_blame"] = program_blame.of(
            fresh, scenario.cost, scenario.host, args.program or ""
        )
    elif args.blame:
        with counted(console, run.requests, "requests left out once, for --blame") as progress:
            found = blame.of(fresh, scenario.cost, scenario.host, run=run, progress=progress)
        numbers["simulation"]["blame"] = found.by_client()
    again = partial(simulate, cost=scenario.cost, host=scenario.host, records=True)
    return Served({**numbers, "program_times": each}, run, lambda: again(*fresh()))


def figures_of(args: Values, run: Run, rows: Rows, chosen: Chosen, seed: int, brief: bool = False) -> dict[str, Any]:
    """Return the figures of a run as JSON has them."""
    config = {**config_of(args), "policies": [chosen.name], "seed": seed}
    limits = {name: getattr(args, name) for name in LIMITS}
    return result.result(run, config=config, rows=rows, seed=seed, limits=limits, date=now(), brief=brief)


def without_effect(args: Values, scenario: Scenario[Rows]) -> Reasons:
    """Yield the options of this command that have no effect beside the others."""
    named = ", ".join(args.policies)
    if not args.out:
        yield "no_plots no_records", "requires --out. Use --out DIR"
    if not scenario.rows.calls or scenario.rows.ids is None:
        yield "save_trace", "has no effect: no requests are drawn programs. Use --workload agents"
    if not args.blame or not scenario.rows.closed:
        yield "program", "requires --blame and programs. Use --blame --workload agents"
    if not args.kv_tokens:
        yield "open_ended", f"{UNLIMITED} 65536"
        yield "evict", f"{UNLIMITED} 4096"
    if all(policy.padded or policy.closed for policy in scenario.asked):
        yield "open_ended", f"has no effect: {named} always reserves the whole answer. Use dynamic, or leave it out"
    if not scenario.rows.has_contents:
        yield "evict", "has no effect: no prompts share a beginning. Use --workload agent"


def check_evict(args: Values, rows: Rows) -> None:
    """Reject an --evict that is given twice, or goes by sessions that the requests do not have."""
    check_once("--evict", args.evict)
    heeding = [name for name in args.evict if policies.get_eviction(name).uses]
    if rows.closed and "belady" in args.evict:
        raise UsageError("--evict belady needs arrivals that do not depend on the policy. Use ttl, or --open-loop")
    if heeding and not rows.keep_s:
        raise UsageError(f"--evict {heeding[0]} has no effect: the requests have no session. Use --workload agent")


def hint_words(simulation: dict[str, Any]) -> str:
    """Count refusals, preemptions and cached tokens, and describe what clients waited and how many deadlines were met, where there are any."""
    words = f"; {simulation['refused']:,} requests refused" if simulation["refused"] else ""
    words += f"; {simulation['preemptions']:,} preemptions" if simulation["preemptions"] else ""
    words += f"; {simulation['cached']:.0%} of prompt tokens cached" if simulation["cached"] >= 0.005 else ""
    if "acceptance" in simulation:
        words += f"; {simulation['acceptance']:.0%} of draft tokens accepted, {simulation['tokens_per_step']:.2f} tokens per step"
    if simulation.get("clients"):
        means = sorted((numbers["mean_ttft_ms"], name) for name, numbers in simulation["clients"].items())
        (low, first), (high, last) = means[0], means[-1]
        words += f"; TTFT mean by client from {low:,.0f} ms ({first}) to {high:,.0f} ms ({last})"
    if "deadlines_met" in simulation:
        words += f"; {simulation['deadlines_met']:.1%} of deadlines met"
    return words


def load_of(args: Values, rows: Rows) -> str:
    """Name the arrivals as client.compare does."""
    if rows.arrivals:
        return rows.arrivals.text
    return f"rate:{args.rate:g}" if args.is_given("rate") else f"trace:{args.speed:g}"


def make_store(args: Values, loads: list[str]) -> store.Store:
    """Open the folder of the results; UsageError if it holds some already."""
    if (args.out / "summary.json").exists():
        raise UsageError(f"{str(args.out)!r} holds results already. Use another --out")
    head = {
        "name": args.out.name, "date": now(), "command": args.command_line, "seed": args.seed,
        "workload": f"trace:{args.trace.name}" if args.trace else args.workload,
        "loads": loads, "policies": args.policies, "machine": result.MACHINE, "versions": result.versions(),
    }  # fmt: skip
    return store.Store(args.out, head)


def finish(console: Console, args: Values) -> None:
    """Write the table and the page of the results in --out."""
    ending.write_table(store.read(args.out))
    if not args.no_plots:
        ending.draw_page(args.out, console)
    say(console, f"written: {args.out}")


def _number(runs: abc.Sequence[dict[str, Any]], key: str) -> str:
    """Return the mean of a figure over the runs, and half the width of its 95 % interval if there are enough of them."""
    if (mean := summary.average(runs, key)) is None:
        return "-"
    span, digits = figures.student([run[key] for run in runs]), 0 if mean >= 1000 else 1
    return f"{mean:,.{digits}f}" + (f" ±{(span[1] - span[0]) / 2:,.{digits}f}" if span else "")


def show_runs(console: Console, results: abc.Sequence[dict[str, Any]]) -> None:
    """Print one result in full, or a line for each policy."""
    for n in results:
        if "blame" in n["simulation"]:
            console.print(tables.blame(n["policy"], n["simulation"]["blame"]))
        if (of := n["simulation"].get("program_blame")) is not None:
            say(console, f"{n['policy']}: {program_blame.sentence(of)}")
    of_programs = tables.programs(results)
    for table in of_programs:
        console.print(table_of(*table, no_wrap=True))
    where = f"on {results[0]['model_id']}"
    if len(results) == 1:
        times, counts = tables.result(results[0])
        times.title = f"{results[0]['policy']}, simulated: milliseconds"
        counts.title = f"Result {where}"
        console.print(times, counts)
        say(console, regret.sentence(results[0]["simulation"]))
        return
    columns = {
        "tokens/s": "output_throughput", "E2E\nmean": "mean_e2el_ms", "E2E\np99": "p99_e2el_ms",
        "TTFT\nmean": "mean_ttft_ms", "TTFT\np99": "p99_ttft_ms", "ITL\np99": "p99_itl_ms",
    }  # fmt: skip
    groups = {n["policy"]: [other for other in results if other["policy"] == n["policy"]] for n in results}
    rows = [[name, *(_number(some, key) for key in columns.values())] for name, some in groups.items()]
    repeats = len(results) // len(groups)
    title = f"simulated, the same {'programs' if of_programs else 'arrivals'} for all; times in ms"
    title += f"; means of {repeats} seeds and their 95 % intervals" if repeats > 1 else ""
    console.print(table_of(title, ("policy", *columns), rows, no_wrap=repeats == 1, caption=where))
    for n in results if repeats == 1 else ():
        say(console, f"{n['policy']}: {regret.sentence(n['simulation'])}")

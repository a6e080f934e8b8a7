"""Serve a workload with one or more policies and report the result of each."""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import replace
from itertools import product
from typing import Any

from rich.console import Console

import policies
from client import ending
from client.report import store, tables
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
from simulate.simulator import simulate
from terminal.console import say, table_of
from terminal.options import FILE, FOLDER, POSITIVE, Choice, Option, UsageError, Values
from terminal.progress import counted


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
            *(
                Option(f"--{name}", f"{name.upper()} limit in seconds, for goodput", POSITIVE)
                for name in ("ttft", "tpot", "e2el")
            ),
        ],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve one workload with each policy."""
    scenario = make_scenario(args, console, reported=("client", "deadline"))
    refuse(args, without_effect(args, scenario))
    check_evict(args, scenario.rows)
    if args.blame and (count := len(scenario.rows.at)) > blame.MOST_REQUESTS:
        num = max(1, blame.MOST_REQUESTS * (args.num or count) // count)  # which may count programs
        raise UsageError(f"--blame takes at most {blame.MOST_REQUESTS} requests, not {count:,}. Use --num {num}")
    if args.save_trace:
        rows = scenario.rows
        args.save_trace.write_text("".join(agentic.lines(rows.calls or [], rows.ids or [], blocks.TOKENS)))
    folder = make_store(args, scenario.rows) if args.out else None
    results = []
    for chosen, evict in product(scenario.policies, args.evict):
        evicting = replace(scenario, engine=replace(scenario.engine, evict=evict))
        results.append(serve(args, console, evicting, chosen, folder))
    show_runs(console, results)
    if folder:
        folder.close()
        ending.write_table(store.read(args.out))
        if not args.no_plots:
            ending.draw_page(args.out, console)
        say(console, f"written: {args.out}")
    short = [{k: v for k, v in n.items() if k not in store.ARRAYS} for n in results]
    return short[0] if len(short) == 1 else {"runs": short}


def serve(
    args: Values, console: Console, scenario: Scenario[Rows], chosen: Chosen, folder: store.Store | None
) -> dict[str, Any]:
    """Serve the requests with one policy; return the result, and keep it in the folder if there is one."""
    evict, rows = scenario.engine.evict, scenario.rows

    def fresh() -> tuple[Scheduler, list[Sequence]]:
        scheduler, sequences = scenario.fresh(chosen)
        if len(args.evict) > 1:
            scheduler.policy.name += f" {evict}"
        return scheduler, sequences

    scheduler, sequences = fresh()
    began = time.perf_counter()
    records = folder is not None and not args.no_records
    run = simulate(scheduler, sequences, scenario.cost, scenario.host, records=records)
    seconds = time.perf_counter() - began
    numbers = result.result(
        run, config={**config_of(args), "policies": [chosen.name], "evict": evict}, seed=args.seed,
        limits={"ttft": args.ttft, "tpot": args.tpot, "e2el": args.e2el}, arrivals=rows.arrivals,
        trace_sha256=rows.sha256, date=now(),
    )  # fmt: skip
    count, took = numbers["num_prompts"], f"{run.steps:,} steps in {seconds:.2f} s"
    pace = f"{took}, {60 * count / max(seconds, 1e-9):,.0f} requests a minute"
    say(console, f"{run.policy}: {pace}{hint_words(numbers['simulation'])}")
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
    if folder:
        result.keep(folder, load_of(args, rows), run, {**numbers, "program_times": each})
    return numbers


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
    return rows.arrivals.text if rows.arrivals else f"trace:{args.speed:g}"


def make_store(args: Values, rows: Rows) -> store.Store:
    """Open the folder of the results; UsageError if it holds some already."""
    if (args.out / "summary.json").exists():
        raise UsageError(f"{str(args.out)!r} holds results already. Use another --out")
    head = {
        "name": args.out.name, "date": now(), "command": args.command_line, "seed": args.seed,
        "workload": f"trace:{args.trace.name}" if args.trace else args.workload,
        "loads": [load_of(args, rows)], "policies": args.policies,
        "machine": result.machine({"cost": args.cost}), "versions": {},
    }  # fmt: skip
    return store.Store(args.out, head)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def show_runs(console: Console, results: abc.Sequence[dict[str, Any]]) -> None:
    """Print one result in full, or a line for each."""
    for n in results:
        if "blame" in n["simulation"]:
            console.print(tables.blame(n["policy"], n["simulation"]["blame"]))
        if (of := n["simulation"].get("program_blame")) is not None:
            say(console, f"{n['policy']}: {program_blame.sentence(of)}")
    of_programs = tables.programs(results)
    for table in of_programs:
        console.print(table_of(*table, no_wrap=True))
    if len(results) == 1:
        times, counts = tables.result(results[0])
        times.title = f"{results[0]['policy']}, simulated: milliseconds"
        console.print(times, counts)
        say(console, regret.sentence(results[0]["simulation"]))
        return
    columns = {
        "tokens/s": "output_throughput", "E2E\nmean": "mean_e2el_ms", "E2E\np99": "p99_e2el_ms",
        "TTFT\nmean": "mean_ttft_ms", "TTFT\np99": "p99_ttft_ms", "ITL\np99": "p99_itl_ms",
    }  # fmt: skip
    rows = [[n["policy"], *(_number(n[key]) for key in columns.values())] for n in results]
    title = f"simulated, the same {'programs' if of_programs else 'arrivals'} for all; times in ms"
    console.print(table_of(title, ("policy", *columns), rows, no_wrap=True))
    for n in results:
        say(console, f"{n['policy']}: {regret.sentence(n['simulation'])}")

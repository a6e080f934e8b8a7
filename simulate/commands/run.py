"""Serve a workload with one or more policies and report the result of each."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from itertools import product
from typing import Any

from rich.console import Console

import policies
from client import ending
from client.report import store, tables
from costs.cost import Sizes
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import result, workloads
from simulate.best import blame, regret
from simulate.commands.arguments import arrival_options, config_of, engine_options, now, policies_argument, refuse
from simulate.commands.inputs import make_scheduler
from simulate.commands.option_checks import check_once
from simulate.commands.prepared import Sections, prepare
from simulate.simulator import simulate
from terminal.console import say, table_of
from terminal.options import FOLDER, POSITIVE, Choice, Number, Option, UsageError, Values
from terminal.progress import counted

PREEMPTION_OPTIONS = [
    Option(
        "--preemption", "what a preempted request costs: computing its tokens again, or moving its KV pages out and in",
        Choice(["recompute", "swap"]), default="recompute",
    ),
    Option("--swap-gbps", "with swap: gigabits per second in each direction; 128 is PCIe 3.0 with 16 lanes", POSITIVE, default=128.0),
    Option("--swap-space", "with swap: GiB of the host's memory; what does not fit is recomputed", POSITIVE, default=4.0),
    Option(
        "--kv-bytes", "with swap: bytes of keys and values per token (default: GPT-2 medium in 16 bits)", Number(1),
        default=Sizes().kv_bytes,
    ),
]  # fmt: skip


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
            *PREEMPTION_OPTIONS,
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
            Option("--no-plots", "write no plots and no page", None),
            Option(
                "--blame",
                "print how much each client's requests delayed those of the others, from runs without each request; "
                f"at most {blame.MOST_REQUESTS} requests",
                None,
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
    if not args.out:
        refuse(args, ("no_plots", "no_records"), "requires --out. Use --out DIR")
    cost, host, rows = prepare(args, console, reported=("client", "deadline"))
    if args.open_ended:
        check_open_ended(args)
    if args.blame and len(rows.at) > blame.MOST_REQUESTS:
        raise UsageError(
            f"--blame takes at most {blame.MOST_REQUESTS} requests, not {len(rows.at):,}. Use --num {blame.MOST_REQUESTS}"
        )
    check_evict(args, rows)
    check_preemption(args)
    folder = make_store(args, rows) if args.out else None
    results = []
    for policy, evict in product(args.policies, args.evict):

        def fresh(policy: str = policy, evict: str = evict) -> tuple[Scheduler, list[Sequence]]:
            sequences = rows.sequences()
            for seq in sequences:
                seq.open_ended |= args.open_ended
            scheduler = make_scheduler(args, policy, prefix_cache=rows.has_contents, evict=evict)
            if len(args.evict) > 1:
                scheduler.policy.name += f" {evict}"
            foresee(scheduler, sequences)
            return scheduler, sequences

        scheduler, sequences = fresh()
        began = time.perf_counter()
        records = folder is not None and not args.no_records
        run = simulate(scheduler, sequences, cost, host, records=records)
        seconds = time.perf_counter() - began
        limits = {"ttft": args.ttft, "tpot": args.tpot, "e2el": args.e2el}
        numbers = result.result(
            run, config={**config_of(args), "policies": [policy], "evict": evict}, seed=args.seed, limits=limits,
            arrivals=rows.arrivals, trace_sha256=rows.sha256, date=now(),
        )  # fmt: skip
        pace = f"{run.steps:,} steps in {seconds:.2f} s, {run.steps / max(seconds, 1e-9):,.0f} a second"
        say(console, f"{scheduler.policy.name}: {pace}{hint_words(numbers['simulation'])}")
        numbers["simulation"] |= regret.of(run, cost, scheduler, fresh)
        if args.blame:
            with counted(console, run.requests, "requests left out once, for --blame") as progress:
                found = blame.of(fresh, cost, host, run=run, progress=progress)
            numbers["simulation"]["blame"] = found.by_client()
        if folder:
            result.keep(folder, load_of(args, rows), run, numbers)
        results.append(numbers)
    show_runs(console, results)
    if folder:
        folder.close()
        ending.write_table(store.read(args.out))
        if not args.no_plots:
            ending.draw_page(args.out, console)
        say(console, f"written: {args.out}")
    short = [{k: v for k, v in n.items() if k not in store.ARRAYS} for n in results]
    return short[0] if len(short) == 1 else {"runs": short}


def check_evict(args: Values, rows: workloads.Rows) -> None:
    """Reject an --evict that is given twice, or would be the same as lru."""
    check_once("--evict", args.evict)
    if not args.kv_tokens:
        refuse(args, ("evict",), "has no effect while KV memory is unlimited. Use --kv-tokens 4096")
    if not rows.has_contents:
        refuse(args, ("evict",), "has no effect: no prompts share a beginning. Use --workload agent")
    heeding = [name for name in args.evict if policies.get_eviction(name).heeds]
    if heeding and not rows.keep_s:
        raise UsageError(f"--evict {heeding[0]} has no effect: the requests have no session. Use --workload agent")


def check_preemption(args: Values) -> None:
    """Reject --preemption swap where no request is ever preempted, and its options without it."""
    if args.preemption == "recompute":
        refuse(args, ("swap_gbps", "swap_space", "kv_bytes"), "has no effect. Use --preemption swap")
        return
    answer = Sequence([0], 1 << 30, open_ended=args.open_ended)
    chosen = [make_scheduler(args, name) for name in args.policies]
    if not any(
        made.hooks.preempts or (args.kv_tokens and made.policy.reserve_tokens(answer) < answer.total) for made in chosen
    ):
        why = f"has no effect: {', '.join(args.policies)} never preempts a request. Use --kv-tokens 65536 --open-ended"
        refuse(args, ("preemption",), why)


def foresee(scheduler: Scheduler, sequences: Rows[Sequence]) -> None:
    """Let an eviction that knows the future see all requests."""
    if scheduler.pages is not None and scheduler.pages.evict.clairvoyant:
        for seq in sequences:
            scheduler.batch.pages.hash(seq)
        scheduler.pages.evict.foresee(sequences)


def check_open_ended(args: Values) -> None:
    """Reject --open-ended where every request gets the pages of its whole answer at once."""
    if not args.kv_tokens:
        refuse(args, ("open_ended",), "has no effect while KV memory is unlimited. Use --kv-tokens 65536")
    chosen = [policies.get_policy(name, args.max_batch_size) for name in args.policies]
    if all(policy.padded or policy.closed for policy in chosen):
        why = (
            f"has no effect: {', '.join(args.policies)} always reserves the whole answer. Use dynamic, or leave it out"
        )
        refuse(args, ("open_ended",), why)


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


def load_of(args: Values, rows: workloads.Rows) -> str:
    """Name the arrivals as client.compare does."""
    return rows.arrivals.text if rows.arrivals else f"trace:{args.speed:g}"


def make_store(args: Values, rows: workloads.Rows) -> store.Store:
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


def show_runs(console: Console, results: Rows[dict[str, Any]]) -> None:
    """Print one result in full, or a line for each."""
    for n in results:
        if "blame" in n["simulation"]:
            console.print(tables.blame(n["policy"], n["simulation"]["blame"]))
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
    console.print(
        table_of("simulated, the same arrivals for all; times in ms", ("policy", *columns), rows, no_wrap=True)
    )
    for n in results:
        say(console, f"{n['policy']}: {regret.sentence(n['simulation'])}")

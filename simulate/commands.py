"""The commands: what each does with its arguments, what it shows, and the object it returns for stdout."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from client import ending
from client.options import UsageError, Values, nearest
from client.report import store
from config import Config
from simulate import (
    calibrate,
    comparison,
    costs,
    fleet,
    mock,
    pictures,
    plan,
    predict,
    prefix,
    published,
    result,
    validate,
    workloads,
)
from simulate.arguments import (
    check_engine,
    check_policies,
    config_of,
    has_own_rate,
    make_cost,
    make_rows,
    make_scheduler,
    notes,
    now,
    options,
    refuse,
    say,
    with_engine,
)
from simulate.costs import Cost, Host
from simulate.simulator import simulate


def run_command(args: Values, console: Console) -> dict[str, Any]:
    """Serve one workload with each policy."""
    if not args.out:
        refuse(args, ("no_plots", "no_records"), "requires --out. Use --out DIR")
    cost, host, rows = prepare(args, console, reported=("client", "deadline"))
    folder = make_store(args, rows) if args.out else None
    told = []
    for policy in args.policies:
        scheduler = make_scheduler(args, policy, prefix_cache=rows.ids is not None)
        began = time.perf_counter()
        records = folder is not None and not args.no_records
        run = simulate(scheduler, rows.sequences(), cost, host, records=records)
        seconds = time.perf_counter() - began
        limits = {"ttft": args.ttft, "tpot": args.tpot, "e2el": args.e2el}
        numbers = result.result(
            run, config={**config_of(args), "policies": [policy]}, seed=args.seed, limits=limits,
            arrivals=rows.arrivals, trace_sha256=rows.sha256, date=now(),
        )  # fmt: skip
        say(
            console,
            f"{policy}: {run.steps:,} steps in {seconds:.2f} s, {run.steps / max(seconds, 1e-9):,.0f} a second"
            + hint_words(numbers["simulation"]),
        )
        if folder:
            result.keep(folder, load_of(args, rows), run, numbers)
        told.append(numbers)
    show_runs(console, told)
    if folder:
        folder.close()
        ending.write_table(store.read(args.out))
        if not args.no_plots:
            ending.draw_page(args.out, console)
        say(console, f"written: {args.out}")
    short = [{k: v for k, v in n.items() if k not in store.ARRAYS} for n in told]
    return short[0] if len(short) == 1 else {"runs": short}


def hint_words(told: dict[str, Any]) -> str:
    """Say how the clients fared and how many deadlines were met, where requests have them."""
    words = ""
    if told.get("clients"):
        means = sorted((numbers["mean_ttft_ms"], name) for name, numbers in told["clients"].items())
        (low, first), (high, last) = means[0], means[-1]
        words += f"; TTFT mean by client from {low:,.0f} ms ({first}) to {high:,.0f} ms ({last})"
    if "deadlines_met" in told:
        words += f"; {told['deadlines_met']:.1%} of deadlines met"
    return words


def prepare(
    args: Values, console: Console, *, reported: Collection[str] = (), **how: bool
) -> tuple[Cost, Host, workloads.Rows]:
    """Return cost, host and requests, after every option was checked; show the notes about them."""
    made = check_policies(args, reported)
    cost, host = make_cost(args)
    check_engine(args, cost, made)
    rows = make_rows(args, **how)
    for note in notes(args, made, rows):
        say(console, f"note: {note}")
    return cost, host, rows


def load_of(args: Values, rows: workloads.Rows) -> str:
    """Name the arrivals as client.compare does."""
    return rows.arrivals.text if rows.arrivals else f"trace:{args.speed:g}"


def make_store(args: Values, rows: workloads.Rows) -> store.Store:
    """Open the folder of the results; what is there already stays."""
    if (args.out / "summary.json").exists():
        raise UsageError(f"{str(args.out)!r} holds results already. Use another --out")
    head = {
        "name": args.out.name, "date": now(), "command": args.command_line, "seed": args.seed,
        "workload": f"trace:{args.trace.name}" if args.trace else args.workload,
        "loads": [load_of(args, rows)], "policies": args.policies,
        "machine": result.machine({"cost": args.cost}), "versions": {},
    }  # fmt: skip
    return store.Store(args.out, head)


def show_runs(console: Console, told: Sequence[dict[str, Any]]) -> None:
    if len(told) == 1:
        table = Table(title=f"{told[0]['policy']}, simulated", show_header=False)
        for name, value in lines(told[0]):
            table.add_row(name, value)
        console.print(table)
        return
    table = Table(title="simulated, the same arrivals for all")
    columns = {
        "tokens/s": "output_throughput", "E2E mean ms": "mean_e2el_ms", "E2E p99 ms": "p99_e2el_ms",
        "TTFT mean ms": "mean_ttft_ms", "TTFT p99 ms": "p99_ttft_ms", "ITL p99 ms": "p99_itl_ms",
    }  # fmt: skip
    table.add_column("policy", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    for n in told:
        table.add_row(n["policy"], *(f"{n[key]:,.1f}" if n[key] is not None else "-" for key in columns.values()))
    console.print(table)


def lines(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    """Lay out one result in the words and order of the field (`vllm bench serve`)."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f}"

    rows = [
        ("Successful requests", str(numbers["completed"])),
        ("Failed requests", str(numbers["failed"])),
        ("Duration (s)", shown(numbers["duration"])),
        ("Requests/s", shown(numbers["request_throughput"])),
        ("Output tokens/s", shown(numbers["output_throughput"])),
        ("Total tokens/s", shown(numbers["total_token_throughput"])),
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = " / ".join(shown(numbers[f"{key}_{name}_ms"]) for key in ("mean", "median", "p99"))
        rows.append((f"{name.upper()} mean / median / p99 (ms)", values))
    return rows


def plan_command(args: Values, console: Console) -> dict[str, Any]:
    """Bisect the rate of each policy at each batch size."""
    limits = limits_of(args)
    check_plan(args)
    cost, host, rows = prepare(args, console, unit=True, draws_more=args.shortest_queue > 0)
    if rows.rate == math.inf:
        raise UsageError(f"{len(rows.at):,} requests that arrive at once have no rate. Use more, or others")
    own_rate = has_own_rate(args)
    unit = rows.faster(1 / rows.rate) if own_rate else rows
    wanted = rows.rate if own_rate and not args.is_given("rate") else args.rate
    source = args.trace.name if args.trace else args.workload
    table = Table(title=f"{source}, {args.cost}: " + ", ".join(map(str, limits)))
    table.add_column("policy", overflow="fold")
    columns = ("slots", "requests/s", "binds", f"replicas for {wanted:.3g}/s", "shortest queue")
    for name in columns:
        table.add_column(name, justify="left" if name == "binds" else "right")
    found = []
    for policy in args.policies:
        for slots in args.slots or [args.max_batch_size]:
            make = partial(make_scheduler, args, policy, slots, prefix_cache=rows.ids is not None)
            capacity = plan.capacity(make, unit, cost, limits, host)
            replicas = capacity.replicas(wanted)
            shortest = None
            if 0 < replicas <= args.shortest_queue:
                shortest = plan.shortest_queue_replicas(make, unit, cost, wanted, replicas, limits, host, args.seed)
            elif args.shortest_queue and replicas:
                say(console, f"note: {policy} with {slots} slots needs {replicas} replicas, more than "
                             f"--shortest-queue {args.shortest_queue} lets it try")  # fmt: skip
            found.append({"policy": policy, "slots": slots, "rate": capacity.low, "fails_at": capacity.high,
                          "binds": capacity.binds, "replicas": replicas, "shortest_queue": shortest})  # fmt: skip
            table.add_row(policy, str(slots), f"{capacity.low:.3g}", capacity.binds,
                          str(replicas or "-"), str(shortest or "-"))  # fmt: skip
    console.print(table)
    if args.out:
        pictures.draw(pictures.capacities, found, args.out, console)
    return {"limits": [asdict(limit) for limit in limits], "wanted": wanted, "capacities": found}


def limits_of(args: Values) -> list[plan.Limit]:
    """Return the limits that the options set, or the default ones."""
    limits = [plan.parse_limit(text) for text in args.limit]
    if args.ttft:
        limits.append(plan.Limit("ttft", "p99", args.ttft))
    if args.itl:
        limits.append(plan.Limit("itl", "p99", args.itl))
    return limits or list(plan.DEFAULT_LIMITS)


def check_plan(args: Values) -> None:
    """Refuse options of `plan` that contradict each other."""
    if args.slots:
        refuse(args, ("max_batch_size",), "has no effect beside --slots. Leave one out")
    if args.arrivals.partition(":")[0] in plan.UNSTEADY:
        steady = ", ".join(name for name in workloads.ARRIVALS if name not in plan.UNSTEADY)
        raise UsageError(f"--arrivals {args.arrivals} has no steady rate to look for. Use {steady}")
    if args.is_given("rate"):
        refuse(args, ("speed",), "has no effect: --rate is what must be held. Leave one out")
    if args.out:
        pictures.check(args.out)


def fleet_command(args: Values, console: Console) -> dict[str, Any]:
    """Serve one workload with many replicas behind each router, once for each policy."""
    routers = args.router or [name for name in fleet.ROUTERS if args.kv_tokens or name not in fleet.NEED_CACHE]
    for name in routers:
        check_router(args, name)
    draws = any(name not in fleet.CHANCELESS for name in routers)
    cost, host, rows = prepare(args, console, draws_more=draws)
    table = Table(title=f"{args.replicas} replicas")
    for name in ("policy", "router"):
        table.add_column(name, overflow="fold")
    for name in ("E2E mean s", "E2E p99 s", "TTFT p99 s", "steps/s"):
        table.add_column(name, justify="right")
    runs = []
    for policy in args.policies:
        told: list[dict[str, Any]] = []
        for name in routers:
            began = time.perf_counter()
            cached = rows.ids is not None
            replicas = [make_scheduler(args, policy, prefix_cache=cached) for _ in range(args.replicas)]
            served = fleet.Fleet(replicas, cost, host, random.Random(args.seed))
            run = served.run(rows.sequences(), fleet.ROUTERS[name]())
            row = {"router": name, "mean_e2el_s": float(run.latency.mean()), "steps": run.steps,
                   "p99_e2el_s": float(np.percentile(run.latency, 99)),
                   "p99_ttft_s": float(np.percentile(run.ttft, 99)), "hit_rate": run.hit_rate,
                   "refused": len(run.sequences) - len(run.done)}  # fmt: skip
            told.append(row)
            if row["refused"]:
                say(console, f"note: {policy} behind {name} refused {row['refused']:,} requests")
            table.add_row(policy, name, *(f"{row[k]:.3f}" for k in ("mean_e2el_s", "p99_e2el_s", "p99_ttft_s")),
                          f"{run.steps / (time.perf_counter() - began):,.0f}")  # fmt: skip
        runs.append({"replicas": args.replicas, "policy": policy, "routers": told})
    console.print(table)
    return runs[0] if len(runs) == 1 else {"runs": runs}


def check_router(args: Values, name: str) -> None:
    """Raise UsageError for a router that is unknown, or that needs prefix caches where there are none."""
    if name not in fleet.ROUTERS:
        raise UsageError(
            f"unknown router {name!r}.{nearest(name, fleet.ROUTERS)} Use one of: {', '.join(fleet.ROUTERS)}"
        )
    if name in fleet.NEED_CACHE and not args.kv_tokens:
        raise UsageError(f"router {name!r} has no effect without prefix caches. Use --kv-tokens 65536")


def prefix_command(args: Values, console: Console) -> dict[str, Any]:
    """Repeat llm-mock's experiment, without and with shared prompts, and compare caches on a trace of blocks."""
    if args.out and args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out is {str(args.out)!r}, which is a file. Use a folder")
    blocks = prefix.read_blocks(args.trace) if args.trace else []
    if not any(args.sizes):
        refuse(args, ("train",), "has no effect: a cache of size 0 holds nothing. Use --sizes 1000")
    cost, host = published.make(args.cost), published.host_of(args.cost)
    told: dict[str, Any] = {"cost": args.cost, "train": args.train}
    for share in args.share:
        rows = prefix.experiment(cost, args.sizes, args.batches, share, args.train, dict.fromkeys(args.kinds), host)
        told[f"share_{share}"] = rows
        table = Table(
            title=f"{args.cost}, prompts share {share} tokens" if share else f"{args.cost}, no shared prompts"
        )
        for name in rows[0]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(row["kind"], *(f"{row[key]:.4g}" for key in list(row)[1:]))
        console.print(table)
    if blocks:
        told["caches"] = prefix.popularity_and_recency(blocks, (100, 300, 1000, 3000, 5000, 10_000, 30_000))
        table = Table(title="hits on the second half: a static trie of the first, and the most recent")
        for name in ("size", "trie", "lru"):
            table.add_column(name, justify="right")
        for row in told["caches"]:
            table.add_row(*(f"{value:,}" for value in row.values()))
        console.print(table)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "prefix.json").write_text(json.dumps(told, indent=1) + "\n")
        pictures.prefix(told, args.out, console)
    return told


def calibrate_command(args: Values, console: Console) -> dict[str, Any]:
    """Time the engine, fit, say how good the fit is, and write the file."""
    if args.out.is_dir():
        raise UsageError(f"--out is {str(args.out)!r}, which is a folder. Use {args.out / 'cost.json'}")
    facts: dict[str, Any] = {"date": now(), "max_tokens_per_step": args.max_tokens_per_step}
    flags = ["--model", args.model, "--load-format", args.load_format, "--dtype", args.dtype,
             "--threads", str(args.threads), "--steps", str(args.steps), "--statistic", args.statistic]  # fmt: skip
    measure_points = calibrate.probe(flags, facts)
    points = calibrate.grid(args.grid, args.max_tokens_per_step)
    began, shown, done = time.perf_counter(), 0.0, 0

    def watched(wanted: Sequence[calibrate.Point]) -> Any:
        nonlocal shown, done
        for seconds in measure_points(wanted):
            done += 1
            if time.perf_counter() - shown > 5:
                shown = time.perf_counter()
                say(console, f"{done} of {len(wanted)} steps timed, {shown - began:.0f} s")
            yield seconds

    found, rows = calibrate.calibrate(watched, points)
    calibrate.write(args.out, found, rows, costs.Host(), facts)
    say(console, f"{found.cost}")
    say(console, f"error on points not seen: {found.mape:.1%} on average, {found.worst:.1%} at worst "
                 f"({len(rows)} points, {time.perf_counter() - began:.0f} s)")  # fmt: skip
    if found.drift > calibrate.DRIFT:
        say(console, f"warning: the same step took {found.drift:.0%} longer or shorter at another time: this machine was "
                     "not its own. Repeat it when nothing else runs, or use --statistic min")  # fmt: skip
    if found.mape > calibrate.ACCEPT_MAPE or found.worst > calibrate.ACCEPT_WORST:
        say(
            console,
            f"warning: above {calibrate.ACCEPT_MAPE:.0%} or {calibrate.ACCEPT_WORST:.0%}: predictions will be poor",
        )
    say(console, f"written: {args.out}. Use it: python -m simulate run dynamic --cost {args.out}")
    return {
        "file": str(args.out),
        "cost": costs.to_dict(found.cost),
        "mape": found.mape,
        "worst": found.worst,
        "drift": found.drift,
    }


def validate_command(args: Values, console: Console) -> dict[str, Any]:
    """Serve the same arrivals by a real server and by the simulator; exit code 1 above a bound."""
    flags = validate.server_flags(args)
    made = check_policies(args)
    cost = _cost_to_validate(args, validate.settings(flags), console)
    check_engine(args, cost, made)
    trace = validate.draw(args.rate, args.num, args.seed)
    told, beyond = [], []
    for policy in args.policies:
        chosen = options(args.policy_option, "--policy-option")
        found = validate.validate(policy, cost, trace, flags, chosen)
        validate.show(console, found)
        beyond += [(policy, c) for c in found.compared if not c.good]
        told.append(found.to_dict())
    _wrapped(console, f"bounds: {comparison.BOUNDS}")
    for policy, c in beyond:
        _wrapped(console, f"error: {policy}: {c.name} is off by {c.error:+.1%}, bound {c.bound:.0%}")
    if beyond:
        _wrapped(console, "Calibrate again when nothing else runs on this machine, or lower --rate")
    return {"good": not beyond, "runs": told}


def _wrapped(console: Console, text: str) -> None:
    """Print a text in lines that fit the terminal."""
    console.print(text, markup=False, highlight=False)


def _cost_to_validate(args: Values, server: Config, console: Console) -> Cost:
    """Return the cost model of --cost, that of a mock server, or one fitted to the server's engine now."""
    if args.cost:
        return make_cost(args)[0]
    refuse(args, ("cost_option",), "changes a model of --cost. Use --cost, too")
    if not server.model:
        raise UsageError(
            "--cost is missing. Use a file of 'python -m simulate calibrate', or --model NAME to time that engine first"
        )
    if mock.is_mock(server.model):
        return with_engine(args, validate.cost_of_mock(server.model))
    say(console, f"no --cost: timing the engine of {server.model} first")
    flags = ["--model", server.model, "--load-format", server.load_format, "--dtype", server.dtype,
             "--threads", str(server.compute_threads)]  # fmt: skip
    points = calibrate.grid("small", args.max_tokens_per_step)
    found, _ = calibrate.calibrate(calibrate.probe(flags, {}), points)
    _wrapped(console, f"error on points not seen: {found.mape:.1%} on average, {found.worst:.1%} at worst")
    if found.drift > calibrate.DRIFT:
        _wrapped(
            console,
            f"warning: the same step took {found.drift:.0%} longer or shorter at another time. Other work on this machine "
            "makes the predictions poor",
        )
    return with_engine(args, found.cost)


def predict_command(args: Values, console: Console) -> dict[str, Any]:
    """Serve a comparison again; the exit code is 0 though some of its runs cannot be."""
    told = predict.predict(args.folder, args.cost)
    table = Table(title=f"measured / simulated by {told['cost']}")
    columns = ("mean s", "p99 s", "off by", "steps alike")
    for name in ("policy", "load", *columns):
        table.add_column(name, justify="right" if name in columns else "left")
    for c in told["compared"]:
        both = (f"{c[key]:.3f} / {c[f'simulated_{key}']:.3f}" for key in ("mean_s", "p99_s"))
        alike = f"{c['steps_alike'] / c['steps']:.1%}" if c.get("steps") else "-"
        table.add_row(c["policy"], c["load"], *both, f"{c['mape']:.1%}", alike)
    for run in told["left_out"]:
        say(console, f"note: {run['policy']}, {run['load']} left out: {run['why']}")
    if not told["compared"]:
        return told
    console.print(table)
    say(console, f"written: {args.folder / 'simulated.csv'}. Draw it: python -m client.report {args.folder}")
    return told

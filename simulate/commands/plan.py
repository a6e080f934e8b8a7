"""Find the highest rate that each policy sustains, and the replicas that a rate needs."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from simulate import workloads
from simulate.commands.arguments import Sections, arrival_options, engine_options, policies_argument
from simulate.commands.inputs import has_own_rate, make_scenario, noise_of
from simulate.commands.option_checks import refuse
from simulate.fleet import plan
from terminal.console import say, table_of
from terminal.options import POSITIVE, Number, Option, UsageError, Values

FEWEST_REQUESTS = 500  # with fewer the tail of a run and its start weigh too much
NOTE = (
    "The arrivals are played faster and slower to find the highest rate. --rate is the rate for which replicas are counted; with "
    "--trace its default is the trace's own rate times --speed."
)


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [policies_argument()],
        "engine": engine_options(),
        "arrivals": arrival_options(num=2200, rate=10.0),
        "plan": [
            Option("--ttft", "p99 limit in seconds (default 1, if no limit is given)", POSITIVE),
            Option("--itl", "p99 limit in seconds (default 0.1, if no limit is given)", POSITIVE),
            Option(
                "--limit", "a limit such as p50:queue:2; may be repeated", metavar="STAT:MEASURE:S", repeat=True, default=[]
            ),
            Option("--slots", "batch sizes to try (default: --max-batch-size)", Number(1), several=True),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Bisect the rate of each policy at each batch size."""
    limits = limits_of(args)
    check_plan(args)
    scenario = make_scenario(args, console, unit=True)
    rows = scenario.rows
    if not rows.closed and (unknown := [limit for limit in limits if limit.measure == "program"]):
        raise UsageError(f"--limit {unknown[0]} needs programs. Use --workload agents, or limit e2el")
    if rows.rate == math.inf:
        raise UsageError(
            f"all {len(rows.at):,} requests arrive at once, so they have no rate. Use another --num or --trace"
        )
    if len(rows.at) < FEWEST_REQUESTS:
        say(
            console,
            f"note: capacities of {len(rows.at):,} requests are too low. Raise --num until there are {FEWEST_REQUESTS}",
        )
    own_rate = has_own_rate(args)
    scenario = replace(scenario, rows=rows.faster(1 / rows.rate) if own_rate else rows)
    wanted = rows.rate if own_rate and not args.is_given("rate") else args.rate
    source = args.trace.name if args.trace else args.workload
    noise = noise_of(args.cost, console)
    capacities, lines = [], []
    for chosen in scenario.policies:
        for slots in args.slots or [args.max_batch_size]:
            policy, sized = chosen.name, replace(scenario, engine=replace(scenario.engine, slots=slots))
            capacity = plan.capacity(sized, chosen, limits)
            interval = plan.interval(sized, chosen, limits, capacity, noise)
            replicas = capacity.replicas(wanted)
            capacities.append({"policy": policy, "slots": slots, "rate": capacity.low, "fails_at": capacity.high,
                          "interval": interval, "binds": capacity.binds, "replicas": replicas})  # fmt: skip
            shown = [f"{interval.low:.3g} to {interval.high:.3g}"] if noise else []
            lines.append((policy, str(slots), f"{capacity.low:.3g}", *shown, capacity.binds, str(replicas or "-")))
    measured = ["90 % interval"] if noise else []
    rate = "programs/s" if rows.closed else "requests/s"
    heads = ("policy", "slots", rate, *measured, "binds", f"replicas for {wanted:.3g}/s")
    console.print(table_of(f"{source}, {args.cost}: " + ", ".join(map(str, limits)), heads, lines, words=["binds"]))
    return {"limits": [asdict(limit) for limit in limits], "wanted": wanted, "capacities": capacities}


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
        refuse(args, [("max_batch_size", "has no effect with --slots. Leave one out")])
    if args.arrivals.partition(":")[0] in plan.UNSTEADY:
        steady = ", ".join(name for name in workloads.ARRIVALS if name not in plan.UNSTEADY)
        raise UsageError(f"--arrivals {args.arrivals} has no steady rate to search for. Use {steady}")
    if args.is_given("rate"):
        refuse(args, [("speed", "has no effect: --rate sets the rate. Leave one out")])

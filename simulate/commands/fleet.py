"""Serve a workload with many replicas behind a router; an autoscaler may change their number with the load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console

from costs.cost import Sizes, Transfer
from routing import autoscalers, bodies
from routing.autoscalers import AUTOSCALERS, Bounds
from routing.routers import ROUTERS, RoutingKey
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate.commands.arguments import Sections, arrival_options, engine_options, policies_argument
from simulate.commands.inputs import make_scenario
from simulate.commands.option_checks import check_once, refuse
from simulate.fleet.disaggregated import Disaggregated, ImportingPool
from simulate.fleet.fleet import Asks, Fleet
from simulate.fleet.fleet_run import FleetRun
from simulate.fleet.instances import Instances
from simulate.fleet.scaling import ScaledFleet, Scaling
from simulate.rows import Rows
from simulate.scenario import Chosen, Scenario
from terminal.console import say, table_of
from terminal.option_types import Type
from terminal.options import POSITIVE, Number, Option, UsageError, Values, nearest

NEED_CACHE, NEED_CLIENTS = {"prefix-aware"}, {"session-sticky"}
SHARED = "shared-queue"  # no router at all
CHANCELESS = {"round-robin", SHARED}  # all other routers choose, or break ties, at random
TTFT = 1.0  # seconds: the limit where none is given


class Replicas(Type):
    """A number of replicas, or the fewest and the most of them."""

    name = "N|N..M"
    wanted = "a whole number of at least 1, or a range such as 2..8"

    def parse(self, value: Any) -> Bounds:
        least, dots, most = str(value).partition("..")
        bounds = Bounds(int(least), int(most if dots else least))
        if not 1 <= bounds.least <= bounds.most:
            raise ValueError
        return bounds


def options() -> Sections:
    """Return the options in sections of the help."""
    routers = f"{', '.join(ROUTERS)}, or {SHARED}: one queue for all; may be repeated (default: all that fit; with --autoscaler: least-loaded)"
    scalers = f"{', '.join(AUTOSCALERS)}, or one with a target, as in tokens:0.5 or requests:8; may be repeated"
    return {
        "arguments": [policies_argument()],
        "engine": engine_options(),
        "arrivals": arrival_options(num=5000),
        "fleet": [
            Option("--replicas", "number of replicas; with --autoscaler a range, as in 2..8", Replicas(),
                   default="8"),
            Option("--router", routers, repeat=True),
            Option("--autoscaler", scalers, repeat=True, metavar="NAME"),
            Option("--startup", "seconds until a new replica takes requests", Number(0, kind=float), default=30.0),
            Option("--upscale-delay", "seconds for which more replicas must be wanted", Number(0, kind=float), default=0.0),
            Option("--downscale-delay", "seconds for which fewer replicas must be wanted", Number(0, kind=float), default=60.0),
            Option(
                "--prefill-replicas", "also serve with two pools: N replicas for prompts and first tokens, the others for later tokens",
                Number(1), several=True, default=[],
            ),
            Option("--transfer-gbps", "gigabits per second at which a prefill replica sends keys and values", POSITIVE,
                   default=100.0),
            Option("--kv-bytes", "bytes of keys and values per token (default: GPT-2 medium in 16 bits)", Number(1),
                   default=Sizes().kv_bytes),
            Option("--ttft", f"TTFT limit in seconds, for the SLO (default {TTFT:g}, if no limit is given)", POSITIVE),
            Option("--tpot", "TPOT limit in seconds, for the SLO", POSITIVE),
            Option("--e2el", "E2EL limit in seconds, for the SLO", POSITIVE),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve one workload with many replicas behind each router, once for each policy and autoscaler."""
    check_scaling(args)
    check_once("router", args.router or [])
    for name in args.router or ():
        check_router(args, name)
    draws = any(name not in CHANCELESS for name in args.router or ROUTERS)
    heeded = {"client"} if NEED_CLIENTS & set(args.router or ROUTERS) else set()
    scenario = make_scenario(args, console, reported=heeded, draws_more=draws)
    check_loops(args, scenario.asked)
    routers = routers_of(args, scenario.rows)
    limits = {name: getattr(args, name) for name in ("ttft", "tpot", "e2el")}
    if not any(limits.values()):
        limits["ttft"] = TTFT
    runs = []
    for chosen in scenario.policies:
        measured: list[dict[str, Any]] = []
        for scaler, prefill in product(args.autoscaler or [""], [0, *args.prefill_replicas]):
            for name in routers:
                result = serve(args, scenario, chosen, scaler, prefill, name)
                labels = {"router": name, **({"autoscaler": scaler} if scaler else {})}
                if args.prefill_replicas:
                    decode = args.replicas.most - prefill
                    labels["pools"] = f"{prefill} + {decode}" if prefill else f"{decode} mixed"
                measured.append({**labels, **figures(result, limits)})
                if measured[-1]["refused"]:
                    say(console, f"note: {chosen.name} behind {name} refused {measured[-1]['refused']:,} requests")
        runs.append({"replicas": shown(args.replicas), "policy": chosen.name, "routers": measured})
    show(console, args, runs, limits, cached=bool(args.kv_tokens) and scenario.rows.has_contents)
    return {"runs": runs}


def serve(args: Values, scenario: Scenario[Rows], chosen: Chosen, scaler: str, prefill: int, router: str) -> FleetRun:
    """Serve the requests with one policy and router, with an autoscaler or `prefill` replicas for prompts alone."""
    rows, machine = scenario.rows, (scenario.cost, scenario.host)
    most = args.replicas.most

    def make(count: int) -> list[Scheduler]:
        return [scenario.engine.scheduler(chosen) for _ in range(count)]

    fleet: Fleet
    if scaler:
        delays = args.startup, args.upscale_delay, args.downscale_delay
        scaling = Scaling(autoscalers.make(scaler), args.replicas, *delays)
        fleet = ScaledFleet(partial(scenario.engine.scheduler, chosen), scaling, *machine, gaps=False)
    elif prefill:
        importing = replace(scenario.engine, prefix_cache=False)
        decode = [importing.scheduler(chosen, ImportingPool) for _ in range(most - prefill)]
        transfer = Transfer(args.kv_bytes, args.transfer_gbps * 1e9 / 8)
        route = ROUTERS["least-loaded"](random.Random(args.seed + 1))
        fleet = Disaggregated(make(prefill), decode, route, transfer, *machine, gaps=False)
    elif router == SHARED:
        return Instances(make(most), *machine, gaps=False).run(rows.arriving())
    else:
        fleet = Fleet(make(most), *machine, gaps=False)
    return fleet.run(rows.arriving(), ROUTERS[router](random.Random(args.seed)), asking(rows))


def asking(rows: Rows) -> Asks | None:
    """Return what a router knows of each request: the blocks of its text, as before real servers, or of its trace."""
    texts, named = rows.texts, rows.blocks
    if texts is not None:
        return lambda seq: RoutingKey(bodies.blocks(texts[int(seq.id)]), seq.client)
    if named is None or not rows.by_number:
        return None
    return lambda seq: RoutingKey(seq.hashes[: len(named.prompts[int(seq.id)])], seq.client)


def figures(run: FleetRun, limits: dict[str, float | None]) -> dict[str, Any]:
    """Return the figures of a run that are printed."""
    return {
        "mean_e2el_s": float(run.latency.mean()), "steps": run.steps,
        "p99_e2el_s": float(np.percentile(run.latency, 99)), "p99_ttft_s": float(np.percentile(run.ttft, 99)),
        "mean_ttft_s": float(run.ttft.mean()), "busiest": run.busiest,
        "hit_rate": run.hit_rate, "refused": run.requests - run.answered, "slo": run.share_within(**limits),
        "replica_hours": run.replica_hours, "mean_replicas": run.mean_replicas,
        **({"history": [list(entry) for entry in run.history]} if run.history else {}),
    }  # fmt: skip


def show(
    console: Console, args: Values, runs: list[dict[str, Any]], limits: dict[str, float | None], cached: bool
) -> None:
    """Print a line for each run, with the columns in which runs differ."""
    slo = ", ".join(f"{name.upper()} up to {limit:g} s" for name, limit in limits.items() if limit)
    every = [{"policy": run["policy"], **row} for run in runs for row in run["routers"]]
    labels = ("policy", "pools", "autoscaler", "router")
    names = [name for name in labels if len({row.get(name) for row in every}) > 1] or ["policy"]
    same = [str(every[0][name]) for name in labels if name not in names and name in every[0]]
    heads = {"E2E mean": "mean_e2el_s", "E2E p99": "p99_e2el_s", "TTFT p99": "p99_ttft_s"}
    shares = {"SLO met": "slo", **({"cache hits": "hit_rate"} if cached else {})}
    hours = {"replicas": "mean_replicas", "replica-h": "replica_hours"} if args.autoscaler else {}
    lines = [
        [*(row[name] for name in names), *(f"{row[key]:,.3f}" for key in heads.values()),
         *(f"{row[key]:.1%}" for key in shares.values()), *(f"{row[key]:,.2f}" for key in hours.values())]
        for row in every
    ]  # fmt: skip
    title = f"{', '.join([f'{shown(args.replicas)} replicas', *same])}; SLO: {slo}; times in seconds"
    console.print(table_of(title, (*names, *heads, *shares, *hours), lines, len(names)))


def shown(bounds: Bounds) -> int | str:
    """Name a number of replicas as --replicas does."""
    return bounds.most if bounds.least == bounds.most else f"{bounds.least}..{bounds.most}"


def check_scaling(args: Values) -> None:
    """Raise UsageError for an autoscaler's options without one, and for an autoscaler without a range of replicas."""
    for text in args.autoscaler or ():
        autoscalers.make(text)
    if not args.autoscaler:
        why = "has no effect. Use --autoscaler tokens"
        refuse(args, [("startup upscale_delay downscale_delay", why)])
        if args.replicas.least < args.replicas.most:
            raise UsageError(f"--replicas {shown(args.replicas)} requires an autoscaler. Use --autoscaler tokens")
    elif args.replicas.least == args.replicas.most:
        raise UsageError(f"--autoscaler has no effect on {args.replicas.most} replicas. Use --replicas 2..8")
    check_pools(args)


def check_pools(args: Values) -> None:
    """Raise UsageError for impossible pools, and for options of a transfer without pools."""
    if not args.prefill_replicas:
        refuse(args, [("transfer_gbps kv_bytes", "has no effect. Use --prefill-replicas 2")])
        return
    if args.autoscaler:
        refuse(args, [("prefill_replicas", "cannot be combined with --autoscaler. Leave one out")])
    if max(args.prefill_replicas) >= args.replicas.most:
        raise UsageError(
            f"--prefill-replicas {max(args.prefill_replicas)} leaves none of {args.replicas.most} replicas for the other "
            f"tokens. Use at most {args.replicas.most - 1}, or more --replicas"
        )


def check_loops(args: Values, asked: Sequence[Policy]) -> None:
    """Raise UsageError for a loop that cannot compute prompts alone, or cannot share a queue."""
    for name, policy in zip(args.policies, asked):
        if args.prefill_replicas and (policy.padded or policy.closed):
            raise UsageError(f"--prefill-replicas: {name} computes prompts and answers in one batch. Use dynamic")
        if SHARED in (args.router or ()) and not policy.closed:
            raise UsageError(
                f"router {SHARED!r} needs a loop that lets no request join a running batch, which {name} does. "
                "Use triton or static"
            )


def routers_of(args: Values, rows: Rows) -> list[str]:
    """Return the routers that are named, or all that can tell these requests apart."""
    if not rows.client and NEED_CLIENTS & set(args.router or ()):
        raise UsageError("router 'session-sticky' has no effect on requests without clients. Use --clients 100")
    without = (set() if args.kv_tokens else NEED_CACHE) | (set() if rows.client else NEED_CLIENTS)
    usual = ["least-loaded"] if args.autoscaler else [name for name in ROUTERS if name not in without]
    return args.router or usual


def check_router(args: Values, name: str) -> None:
    """Raise UsageError for a router that is unknown, or that needs prefix caches where there are none."""
    if name == SHARED:
        if args.autoscaler or args.prefill_replicas:
            raise UsageError(
                f"router {SHARED!r} needs a fixed number of equal replicas. Leave --autoscaler and --prefill-replicas out"
            )
        return
    if name not in ROUTERS:
        known = [*ROUTERS, SHARED]
        raise UsageError(f"unknown router {name!r}.{nearest(name, known)} Use one of: {', '.join(known)}")
    if name in NEED_CACHE and not args.kv_tokens:
        raise UsageError(f"router {name!r} has no effect without prefix caches. Use --kv-tokens 65536")

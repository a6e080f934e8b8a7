"""Serve a workload with many replicas behind a router."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from client.console import say
from client.options import Number, Option, UsageError, Values, nearest
from fleet.routers import ROUTERS
from simulate.arguments import arrival_options, engine_options, policies_argument
from simulate.commands.prepared import Sections, prepare
from simulate.fleet import Fleet
from simulate.inputs import make_scheduler

NEED_CACHE, NEED_CLIENTS = {"prefix-aware"}, {"session-sticky"}
CHANCELESS = {"round-robin"}  # the others break ties, or choose, at random


def options() -> Sections:
    """Return the options in sections of the help."""
    routers = f"{', '.join(ROUTERS)}; may be repeated (default: all that fit)"
    return {
        "arguments": [policies_argument()],
        "engine": engine_options(),
        "arrivals": arrival_options(num=5000),
        "fleet": [
            Option("--replicas", "number of replicas", Number(1), default=8),
            Option("--router", routers, repeat=True),
        ],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Serve one workload with many replicas behind each router, once for each policy."""
    for name in args.router or ():
        check_router(args, name)
    draws = any(name not in CHANCELESS for name in args.router or ROUTERS)
    heeded = {"client"} if NEED_CLIENTS & set(args.router or ROUTERS) else set()
    cost, host, rows = prepare(args, console, reported=heeded, draws_more=draws)
    without = (set() if args.kv_tokens else NEED_CACHE) | (set() if rows.client else NEED_CLIENTS)
    routers = args.router or [name for name in ROUTERS if name not in without]
    if not rows.client and NEED_CLIENTS & set(routers):
        raise UsageError("router 'session-sticky' has no effect on requests without clients. Use --clients 100")
    table = Table(title=f"{args.replicas} replicas, times in seconds")
    for name in ("policy", "router"):
        table.add_column(name, overflow="fold")
    cached = bool(args.kv_tokens) and rows.has_contents
    for name in ("E2E mean", "E2E p99", "TTFT p99", *(["cache hits"] if cached else [])):
        table.add_column(name, justify="right")
    runs = []
    for policy in args.policies:
        measured: list[dict[str, Any]] = []
        for name in routers:
            replicas = [make_scheduler(args, policy, prefix_cache=cached) for _ in range(args.replicas)]
            served = Fleet(replicas, cost, host, gaps=False)
            run = served.run(rows.arriving(), ROUTERS[name](random.Random(args.seed)))
            row = {"router": name, "mean_e2el_s": float(run.latency.mean()), "steps": run.steps,
                   "p99_e2el_s": float(np.percentile(run.latency, 99)),
                   "p99_ttft_s": float(np.percentile(run.ttft, 99)), "hit_rate": run.hit_rate,
                   "refused": run.requests - run.answered}  # fmt: skip
            measured.append(row)
            if row["refused"]:
                say(console, f"note: {policy} behind {name} refused {row['refused']:,} requests")
            seconds = [f"{row[k]:.3f}" for k in ("mean_e2el_s", "p99_e2el_s", "p99_ttft_s")]
            table.add_row(policy, name, *seconds, *([f"{run.hit_rate:.0%}"] if cached else []))
        runs.append({"replicas": args.replicas, "policy": policy, "routers": measured})
    console.print(table)
    return runs[0] if len(runs) == 1 else {"runs": runs}


def check_router(args: Values, name: str) -> None:
    """Raise UsageError for a router that is unknown, or that needs prefix caches where there are none."""
    if name not in ROUTERS:
        raise UsageError(f"unknown router {name!r}.{nearest(name, ROUTERS)} Use one of: {', '.join(ROUTERS)}")
    if name in NEED_CACHE and not args.kv_tokens:
        raise UsageError(f"router {name!r} has no effect without prefix caches. Use --kv-tokens 65536")

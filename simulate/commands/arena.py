"""Rank all policies, and files of one's own, over many workloads."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from rich.console import Console

from client.workloads import catalog
from costs import published
from simulate.arena import arena
from simulate.arena.arena import REFERENCE, Paired, Rules, Standing
from simulate.arena.measures import Measures
from simulate.commands.arguments import Sections
from simulate.pool import spread
from terminal.console import say, table_of
from terminal.options import POSITIVE, Argument, Choice, Number, Option, UsageError, Values

RULES = Rules()
HEADS = {"mean": "mean latency", "p99": "p99 latency", "light": "light clients' wait", "misses": "deadlines missed"}


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [
            Argument("policies", "policy files or loop+order to rank in addition to all shipped policies", nargs=-1, default=[],
                     metavar="[POLICY]..."),
        ],
        "options": [
            Option("--only", f"rank only the named policies and {REFERENCE}", None),
            Option("--by", f"figure to rank by: {', '.join(Measures._fields)}; all are relative to {REFERENCE} on the same requests",
                   Choice(Measures._fields, "FIGURE"), default="mean"),
            Option("--workloads", "workloads of the client, or programs", several=True, default=list(arena.WORKLOADS)),
            Option("--seeds", "number of seeds for each workload", Number(1), default=5),
            Option("--seed", "the first seed", Number(0), default=0),
            Option("--num", "requests in a run", Number(10), default=RULES.num),
            Option("--load", f"rate, as a share of what {REFERENCE} serves when all requests arrive at once", POSITIVE,
                   default=RULES.load),
            Option("--cost", "name of a cost model, or a file written by `calibrate`", default=RULES.cost),
            Option("--max-batch-size", "slots", Number(1), default=RULES.slots),
            Option("--kv-tokens", "tokens that fit into the KV pages, which prompts with the same beginning share", Number(1024),
                   default=RULES.kv_tokens),
            Option("--jobs", "number of processes (default: one per core)", Number(1)),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Play all rounds and rank the policies."""
    if args.only and not args.policies:
        raise UsageError("--only leaves no policy to rank. Name one, as in arena my_policy.py --only")
    names = list(dict.fromkeys([REFERENCE, *args.policies, *([] if args.only else arena.everyone())]))
    rules = Rules(args.cost, args.max_batch_size, args.kv_tokens, args.num, args.load)
    published.make(rules.cost)
    for workload in args.workloads:
        catalog.check(workload)
    for name in names:
        rules.scheduler(name)  # a name or file that is wrong is refused before anything runs
    seeds = range(args.seed, args.seed + args.seeds)
    keys = [(workload, seed) for workload in args.workloads for seed in seeds]
    results = [*spread(partial(arena.play, names, rules), keys, args.jobs, console, "rounds played")]
    rounds = dict(zip(keys, (found for found, _ in results)))
    standings = arena.rank(rounds, args.by)
    _show(standings, args, console)
    never = arena.never_best(rounds)
    say(console, f"never best on any workload, in any of these figures: {', '.join(never) or 'none'}")
    seconds = sum(spent for _, spent in results)
    say(console, f"{len(rounds) * len(names):,} runs of {args.num:,} requests in {seconds:,.0f} s of processor time")
    return {
        "by": args.by, "reference": REFERENCE, "runs": len(rounds) * len(names), "never_best": never,
        "ranking": [
            {"policy": s.policy, **s.mean._asdict(), "beside": {k: p._asdict() for k, p in s.beside.items()}} for s in standings
        ],
    }  # fmt: skip


def shown(field: str, beside: Paired) -> str:
    """Return a figure beside the reference's with its interval: a ratio, or percentage points."""
    mean, half = beside
    if field == "misses":
        return f"{100 * mean:+.1f}" + ("" if half is None else f" ±{100 * half:.1f}")
    return f"{math.exp(mean):.2f}" + ("" if half is None else f" ±{100 * math.expm1(half):.0f}%")


def _show(standings: list[Standing], args: Values, console: Console) -> None:
    rows = [
        [str(place), standing.policy, *(shown(field, standing.beside[field]) for field in HEADS)]
        for place, standing in enumerate(standings, 1)
    ]
    title = f"ranked by {HEADS[args.by]}; multiples of {REFERENCE}'s, misses in points"
    console.print(table_of(title, ("", "policy", *HEADS.values()), rows, left=0, words=["policy"]))
    mean = next(standing.mean for standing in standings if standing.policy == REFERENCE)
    say(console, f"{REFERENCE}: mean latency {mean.mean:.2f} s, p99 {mean.p99:.2f} s, light clients wait {mean.light:.2f} times as long "
                 f"as all, {mean.misses:.1%} of deadlines missed")  # fmt: skip

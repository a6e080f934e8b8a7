"""What the options of a command line describe: the cost of a step, a scheduler, and the requests that arrive."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

import policies
from client.workloads.arrivals import check_span
from client.workloads.corpus import USUAL_CONTEXT
from costs import drafting, published
from costs.cost import Aligned, Cost, Host, Padded, Ragged, Transfer
from costs.steps import decoding, prefilling
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from simulate import workloads
from simulate.commands.arguments import refuse
from simulate.fleet.disaggregated import ImportingPool
from simulate.swap import SwapSpace
from terminal.options import UsageError, Values, read_pairs


def make_cost(args: Values) -> tuple[Cost, Host]:
    numbers = {}
    for name, value in read_pairs(args.cost_option, "--cost-option").items():
        try:
            numbers[name] = float(value)
        except ValueError:
            numbers[name] = math.nan
        if not 0 <= numbers[name] < math.inf:
            raise UsageError(f"--cost-option {name} is {value!r}. Use a number of at least 0, such as {name}=0.01")
    cost = published.make(args.cost, numbers)
    _check_cost(args.cost, cost)
    return with_engine(args, cost), published.host_of(args.cost)


def with_engine(args: Values, cost: Cost) -> Cost:
    """Return a cost model with the padding of --engine."""
    wrappers = {"ragged": Ragged, "padded": Padded, "aligned": Aligned}
    return wrappers[args.engine](cost) if args.engine in wrappers else cost


def _check_cost(name: str, cost: Cost) -> None:
    try:
        seconds = [cost.seconds(decoding(1, 64, 64)), cost.seconds(prefilling(64))]
    except ZeroDivisionError:
        seconds = [math.inf]
    if not all(0 <= s < math.inf for s in seconds) or not any(seconds):
        raise UsageError(
            f"with these constants a step of cost model {name} takes {seconds[0]:g} s, but must take a finite time above 0. "
            "Change --cost-option"
        )


def make_scheduler(
    args: Values,
    policy: str,
    slots: int = 0,
    *,
    prefix_cache: bool = False,
    importing: bool = False,
    evict: str = "lru",
) -> Scheduler:
    """Return a scheduler as the options describe it; `prefix_cache` needs prompts with contents.

    `importing`: of a decode replica, which gets prompts with their keys and values.
    """
    values = read_pairs(args.policy_option, "--policy-option")
    instance = policies.get_policy(policy, max_batch_size=slots or args.max_batch_size, options=values)
    size = args.page_size if args.kv_tokens else 0
    pool = ImportingPool if importing else PagePool
    chosen = policies.get_eviction(evict)
    pages = pool(args.kv_tokens // size + 1, size, prefix_cache=prefix_cache, evict=chosen) if size else None
    speculator = None if args.acceptance is None else drafting.speculator(args.acceptance, args.drafts, args.seed)
    scheduler = Scheduler(instance, pages, args.max_tokens_per_step, speculator=speculator)
    if getattr(args, "preemption", "") == "swap":
        transfer = Transfer(args.kv_bytes, args.swap_gbps * 1e9 / 8)
        scheduler.batch.pages = SwapSpace(pages, transfer, int(args.swap_space * 2**30 / args.kv_bytes))
    return scheduler


def has_own_rate(args: Values) -> bool:
    """Whether the arrivals have a rate of their own, which --rate cannot set."""
    return bool(args.trace) or _replays_workload(args) or ":" in args.arrivals


def _replays_workload(args: Values) -> bool:
    return args.workload.startswith("trace:") and not args.is_given("arrivals")


def make_rows(args: Values, *, unit: bool = False, draws_more: bool = False) -> workloads.Rows:
    """Return the requests that the options describe; `unit`: at one a second, for a command that looks for a rate.

    `draws_more` says that the command has another use for --seed than to draw requests.
    """
    if has_own_rate(args) and not unit:
        remedy = "Use --speed" if args.trace else "Leave it out"
        refuse(args, ("rate",), f"has no effect on arrivals that have their own rate. {remedy}")
    if args.trace:
        refuse(args, ("workload", "arrivals"), "has no effect with --trace. Leave one out")
        if not (draws_more or args.clients or args.priorities or args.slo or args.copies > 1):
            refuse(args, ("seed",), "has no effect: nothing in --trace is random. Leave it out")
        rows = workloads.read(args.trace)
    else:
        refuse(args, ("speed",), "requires --trace. Add it, or use --rate")
        refuse(args, ("copies",), "requires --trace. Add it, or use a larger --num")
        if args.arrivals == "burst" and not unit:
            refuse(args, ("rate",), "has no effect: in a burst all arrive at once. Leave it out")
        replays = _replays_workload(args)
        count = None if replays and not args.is_given("num") else args.num
        arrivals = "trace" if replays else args.arrivals
        context = max(args.context, USUAL_CONTEXT)
        rows = workloads.draw(args.workload, 1.0 if unit else args.rate, count, args.seed, arrivals, context)
    if rows.client:
        source = "--trace" if args.trace else f"--workload {args.workload}"
        refuse(args, ("clients",), f"has no effect: {source} names its clients. Leave it out")
    if rows.priority:
        refuse(args, ("priorities",), "has no effect: --trace has priorities. Leave it out")
    if args.context:
        rows = rows.fitting(args.context)
    if args.trace:
        if args.is_given("num"):
            rows = rows.only(np.arange(min(args.num, len(rows.at))))
        rows = rows.faster(args.speed)
        check_span(rows.at, f"Use a higher --speed than {args.speed!r}, or leave out the last requests with --num")
        if args.copies > 1:
            rows = rows.copied(args.copies, args.seed)
    rows = rows.hinted(args.seed, args.clients, args.priorities, args.slo)
    _check_kv(args, int(rows.most.max()))
    return replace(rows, page_size=args.page_size)


def _check_kv(args: Values, longest: int) -> None:
    """Reject KV pages that do not hold the longest request, and a page size where there are no pages."""
    size = args.page_size
    if not args.kv_tokens:
        refuse(args, ("page_size",), "has no effect while KV memory is unlimited. Use --kv-tokens 65536")
    elif -(-longest // size) > args.kv_tokens // size:
        raise UsageError(
            f"--kv-tokens is {args.kv_tokens:,}, and the longest request has {longest:,} tokens. "
            f"Use --kv-tokens {-(-longest // size) * size} or more, or leave out the requests that are longer, with --context"
        )

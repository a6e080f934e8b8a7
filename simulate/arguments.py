"""What the commands share: the options of engine and arrivals, their checks, and what is built from them.

An option is used or rejected: one that can have no effect beside the others is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

import policies
from client.options import FILE, POSITIVE, Argument, Choice, Number, Option, UsageError, Values
from client.workloads import catalog
from client.workloads.corpus import USUAL_CONTEXT
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate import published, workloads
from simulate.costs import Cost, Host, Padded, Ragged
from simulate.steps import decoding, prefilling

PAGE_SIZE = 16


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def options(pairs: Sequence[str], flag: str) -> dict[str, str]:
    """Read name=value pairs."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{flag} is {pair!r}, but must be NAME=VALUE. Use {flag} {pair}=1")
        values[name] = value
    return values


def pairs(flag: str, help: str) -> Option:
    return Option(flag, help, metavar="NAME=VALUE", repeat=True, default=[])


def policies_argument() -> Argument:
    names = f"loop or loop+order: {', '.join(policies.names())}"
    return Argument("policies", names, nargs=-1, required=True, metavar="POLICY...")


def engine_options(
    *, kv: bool = True, cost: str | None = "oracle-a", default_cost: str = "", max_tokens_per_step: int = 2048
) -> list[Option]:
    """Return the options of the engine; `default_cost` describes a missing default."""
    return [
        pairs("--policy-option", "option of the policy; may be repeated; 'python -m simulate check --help' lists all"),
        Option("--cost", f"name of a cost model, or a file written by `calibrate`{default_cost}", default=cost),
        pairs("--cost-option", "option of the cost model; may be repeated"),
        Option(
            "--engine", "whether a step computes padding; as-is: if the policy pads; ragged: never; padded: always",
            Choice(["as-is", "ragged", "padded"]), default="as-is",
        ),
        Option("--max-batch-size", "slots: maximum number of requests computed together", Number(1), default=32),
        Option(
            "--max-tokens-per-step", "maximum tokens per step; longer prompts are split, except by padding policies", Number(1),
            default=max_tokens_per_step,
        ),
        *([Option("--kv-tokens", "tokens that the KV pages hold; 0: no limit", Number(0), default=0)] if kv else []),
    ]  # fmt: skip


def arrival_options(num: int = 1000, rate: float = 2.0) -> list[Option]:
    """Return the options of the arrivals."""
    return [
        Option(
            "--workload", f"a workload of the client: {', '.join(form for form, _ in catalog.describe())}",
            default="clipped-normal",
        ),
        Option(
            "--arrivals", f"{', '.join(workloads.ARRIVALS)}, or an open load of the client, such as gamma:2:0.5",
            default="poisson",
        ),
        Option("--rate", "requests per second", POSITIVE, default=rate),
        Option("--num", "number of requests; with --trace: all of them, or the first N", Number(1), default=num),
        Option("--trace", "take the requests from this CSV or JSON-lines file", FILE),
        Option("--speed", "play a trace this many times as fast", POSITIVE, default=1.0),
        Option(
            "--context", "leave out requests with a longer prompt and answer together; above 1024: cut them to it, as the "
            "client does for a model with that context; 0: keep all", Number(0, name="TOKENS"),
            default=0,
        ),
        Option(
            "--clients", "give each request one of N clients, for orders such as vtc; the k-th sends 1/k as often as "
            "the first", Number(2), default=0,
        ),
        Option(
            "--priorities", "give each request a priority from 1 (first) to N, all equally likely", Number(2),
            default=0,
        ),
        Option(
            "--slo", "give each request one of these deadlines, in seconds, all equally likely, for edf", POSITIVE,
            metavar="SECONDS", several=True, default=[],
        ),
        Option("--seed", "random seed", Number(0), default=0),
    ]  # fmt: skip


class Hint(NamedTuple):
    """A property of requests that an order can use: its option, its name, an order that uses it, and how to get it."""

    option: str
    words: str
    order: str
    remedy: str


HINTS = {
    "client": Hint("clients", "the client", "vtc", "Use --clients 4"),
    "priority": Hint("priorities", "the priority", "priority", "Use --priorities 3"),
    "deadline": Hint("slo", "the time to the deadline", "edf", "Use --slo 2 10"),
    "prefix": Hint(
        "", "the cached part of the prompt", "lpm",
        "Use --workload shared-prefix --kv-tokens 65536",
    ),
}  # fmt: skip


def refuse(args: Values, names: Iterable[str], why: str) -> None:
    """Raise UsageError for the first of these options that is on the command line."""
    for name in names:
        if args.is_given(name):
            value = getattr(args, name)
            shown = "" if value is True else " " + _shown(value)
            raise UsageError(f"--{name.replace('_', '-')}{shown} {why}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_policies(args: Values, reported: Collection[str] = ()) -> list[Policy]:
    """Return the policies as they will run; reject options that none of them uses.

    The command's result reports the hints in `reported` for every policy.
    """
    if len(set(args.policies)) < len(args.policies):
        twice = next(name for name in args.policies if args.policies.count(name) > 1)
        raise UsageError(f"policy {twice} is given twice. Name it once")
    chosen = options(args.policy_option, "--policy-option")
    named = ", ".join(args.policies)
    loops = {name.partition("+")[0] for name in args.policies}
    if "dynamic" in loops and chosen.get("reserve") == "prompt" and not getattr(args, "kv_tokens", True):
        raise UsageError("--policy-option reserve=prompt has no effect on unlimited KV. Use --kv-tokens 65536")
    every: list[Policy] = []
    for slots in getattr(args, "slots", None) or [args.max_batch_size]:
        some = [policies.get_policy(name, max_batch_size=slots, options=chosen) for name in args.policies]
        if all(policy.max_batch_size < slots for policy in some):
            most = max(policy.max_batch_size for policy in some)
            why = f"has no effect: {named} never runs more than {most} at once. Leave it out"
            refuse(args, ("max_batch_size", "slots"), why)
        every += some
    _check_tokens_per_step(args, named, every)
    _check_hints(args, named, every, reported)
    return every


def _check_tokens_per_step(args: Values, named: str, every: Iterable[Policy]) -> None:
    ragged = [policy.max_batch_size for policy in every if not policy.padded]
    if not ragged:
        why = f"has no effect: {named} pads prompts and splits none. Leave it out"
        refuse(args, ("max_tokens_per_step",), why)
    elif (most := max(ragged)) > args.max_tokens_per_step:
        why = f"is too few: {most} running requests compute a token each. Use {most} or more, or fewer slots"
        refuse(args, ("max_tokens_per_step",), why)


def _check_hints(args: Values, named: str, every: Sequence[Policy], reported: Collection[str]) -> None:
    known = {*policies.names(), *policies.order_names()}
    if not all(part in known for name in args.policies for part in name.split("+")):
        return  # a policy from a user's file may use any hint
    loop = args.policies[0].partition("+")[0]
    for hint, (option, words, order, _) in HINTS.items():
        if hint not in reported and not any(hint in policy.claims.heeds for policy in every):
            why = f"has no effect: {named} does not go by {words}. Use {loop}+{order}, or leave it out"
            refuse(args, (option,), why)


def notes(args: Values, chosen: Iterable[Policy], rows: workloads.Rows) -> Iterator[str]:
    """Yield notes about the requests, and about the orders that cannot tell them apart."""
    yield from rows.notes
    differ_in = rows.differ_in if args.kv_tokens else rows.differ_in - {"prefix"}
    for policy in {policy.name: policy for policy in chosen}.values():
        heeds = policy.claims.heeds
        if heeds and not differ_in & set(heeds):
            hint = HINTS[heeds[0]]
            yield f"{policy.name} goes by {hint.words}, which is the same for all these requests. {hint.remedy}"


def make_cost(args: Values) -> tuple[Cost, Host]:
    numbers = {}
    for name, value in options(args.cost_option, "--cost-option").items():
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
    wrappers = {"ragged": Ragged, "padded": Padded}
    return wrappers[args.engine](cost) if args.engine in wrappers else cost


def check_engine(args: Values, cost: Cost, chosen: Iterable[Policy]) -> None:
    """Reject an --engine that changes the time of no step of these policies."""
    if not isinstance(cost, Ragged | Padded):
        return
    law = cost.law
    pads = law.seconds(prefilling(16, 64)) != law.seconds(prefilling(16, 64, padded=True))
    holds = law.seconds(decoding(2, 128, 64)) != law.seconds(decoding(1, 64, 64))
    padded = {policy.padded for policy in chosen if policy.max_batch_size > 1}
    if isinstance(cost, Ragged) and True not in padded:
        why = f"has no effect: {', '.join(args.policies)} does not pad. Leave it out"
    elif isinstance(cost, Padded) and False not in padded:
        why = f"has no effect: {', '.join(args.policies)} pads already. Leave it out"
    elif not (pads or (holds and isinstance(cost, Ragged))):
        why = f"has no effect: {args.cost} takes the same time with and without padding. Use another --cost"
    else:
        return
    refuse(args, ("engine",), why)


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


def make_scheduler(args: Values, policy: str, slots: int = 0, *, prefix_cache: bool = False) -> Scheduler:
    """Return a scheduler as the options describe it; `prefix_cache` needs prompts with ids."""
    values = options(args.policy_option, "--policy-option")
    instance = policies.get_policy(policy, max_batch_size=slots or args.max_batch_size, options=values)
    pages = PagePool(args.kv_tokens // PAGE_SIZE + 1, PAGE_SIZE, prefix_cache=prefix_cache) if args.kv_tokens else None
    return Scheduler(instance, pages, args.max_tokens_per_step)


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
        refuse(args, ("workload", "arrivals"), "has no effect: --trace has both. Leave one out")
        if not (draws_more or args.clients or args.priorities or args.slo):
            refuse(args, ("seed",), "has no effect: nothing of --trace is drawn. Leave it out")
        rows = workloads.read(args.trace)
    else:
        refuse(args, ("speed",), "requires --trace. Use --rate")
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
    if args.context:
        rows = rows.fitting(args.context)
    if args.trace:
        if args.is_given("num"):
            rows = rows.only(np.arange(min(args.num, len(rows.at))))
        rows = rows.faster(args.speed)
    rows = rows.hinted(args.seed, args.clients, args.priorities, args.slo)
    longest = int((rows.prompt + rows.output).max())
    if args.kv_tokens and -(-longest // PAGE_SIZE) > args.kv_tokens // PAGE_SIZE:
        least = -(-longest // PAGE_SIZE) * PAGE_SIZE
        raise UsageError(
            f"--kv-tokens is {args.kv_tokens:,}, and the longest request has {longest:,} tokens. "
            f"Use --kv-tokens {least} or more, or leave it out with --context"
        )
    return rows


def config_of(args: Values) -> dict[str, Any]:
    """Return the options that repeat a run."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("out", "command_line", "origin")
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

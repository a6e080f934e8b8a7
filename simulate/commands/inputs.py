"""What the options of a command line describe: the scenario of a run, or its parts; checked here, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from rich.console import Console

import policies
from client.workloads.arrivals import check_span
from client.workloads.corpus import USUAL_CONTEXT
from costs import drafting, published
from costs.cost import Aligned, Cost, Host
from costs.steps import decoding, prefilling
from scheduling.policy import Policy
from scheduling.speculation import Speculator
from simulate import workloads
from simulate.commands import option_checks
from simulate.commands.option_checks import check_once, refuse
from simulate.measured.intervals import Noise, of_cost
from simulate.rows import Rows
from simulate.scenario import Chosen, EngineSize, Scenario
from terminal.console import say
from terminal.options import UsageError, Values, read_pairs


def make_scenario(
    args: Values, console: Console, *, reported: Collection[str] = (), unit: bool = False, draws_more: bool = False,
    shuffles: bool = False,
) -> Scenario[Rows]:  # fmt: skip
    """Return what the options describe, after all that every command has were checked; print notes about the requests.

    The command's result reports the hints in `reported` for every policy. `unit` asks for one request a second, for a
    command that looks for a rate; `draws_more` says that it has another use for --seed than to draw requests,
    and `shuffles` that another seed is another run of a trace, too.
    """
    chosen, asked = make_policies(args, reported)
    cost, host = make_cost(args)
    rows = _rows(args, unit=unit, draws_more=draws_more, shuffles=shuffles)
    for note in option_checks.notes(args, asked, rows):
        say(console, f"note: {note}")

    def speculator() -> Speculator | None:
        return None if args.acceptance is None else drafting.speculator(args.acceptance, args.drafts, args.seed)

    engine = EngineSize(
        args.max_batch_size, args.max_tokens_per_step, args.kv_tokens, args.page_size, rows.has_contents,
        speculator=speculator,
    )  # fmt: skip
    return Scenario(chosen, engine, cost, host, rows, asked)


def make_policies(args: Values, reported: Collection[str] = ()) -> tuple[tuple[Chosen, ...], tuple[Policy, ...]]:
    """Return the policies, and one of each for each number of slots, to be asked what it does."""
    args.policies = [policies.complete(name) for name in args.policies]  # a file with an order alone
    check_once("policy", args.policies)
    check_once("--policy-option", [pair.partition("=")[0] for pair in args.policy_option])
    options = read_pairs(args.policy_option, "--policy-option")
    loops = {name.partition("+")[0] for name in args.policies}
    if "dynamic" in loops and options.get("reserve") == "prompt" and not getattr(args, "kv_tokens", True):
        raise UsageError(f"--policy-option reserve=prompt {option_checks.UNLIMITED} 65536")
    chosen = tuple(Chosen(name, options) for name in args.policies)
    sizes = getattr(args, "slots", None) or [args.max_batch_size]
    asked = tuple(each.policy(slots) for slots in sizes for each in chosen)
    refuse(args, option_checks.of_policies(args, asked, reported))
    return chosen, asked


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
    return Aligned(cost) if args.engine == "aligned" else cost


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


def noise_of(cost: str, console: Console) -> Noise | None:
    """Return what a cost model leaves unexplained; print why predictions by an older file have no intervals."""
    noise = of_cost(cost)
    if noise is None and cost.endswith(".json"):
        say(
            console,
            f"note: {cost} lacks the errors of points left out of its fit, so predictions have no intervals. Calibrate again",
        )
    return noise


def has_own_rate(args: Values) -> bool:
    """Whether the arrivals have a rate of their own, which --rate cannot set."""
    return _is_trace(args) or ":" in args.arrivals


def _is_trace(args: Values) -> bool:
    return bool(args.trace) or (args.workload.startswith("trace:") and not args.is_given("arrivals"))


def _rows(args: Values, *, unit: bool, draws_more: bool, shuffles: bool) -> Rows:
    """Return the requests that the options describe."""
    if args.trace:
        rows = workloads.read(args.trace)
    else:
        replays = _is_trace(args)
        count = None if replays and not args.is_given("num") else args.num
        arrivals = "trace" if replays else args.arrivals
        context = max(args.context, USUAL_CONTEXT)
        rows = workloads.draw(args.workload, 1.0 if unit else args.rate, count, args.seed, arrivals, context)
    refuse(args, option_checks.of_arrivals(args, rows, unit=unit, draws_more=draws_more))
    if args.open_loop:
        rows = rows.in_open_loop()
    if args.context:
        rows = rows.fitting(args.context)
    # The order matters: --num counts only requests that fit the context.
    if args.trace:
        if args.is_given("num"):
            rows = rows.first(args.num)
        rows = rows.faster(args.speed)
        if shuffles:
            rows = rows.shuffled(args.seed)
    if _is_trace(args):
        if args.is_given("rate") and not unit:
            rows = rows.at_rate(args.rate)
        check_span(
            rows.at, f"Use a higher --speed than {args.speed!r} or --rate, or leave out the last requests with --num"
        )
    rows = rows.hinted(args.seed, args.clients, args.priorities, args.slo)
    size, longest = args.page_size, int(rows.most.max())
    if args.kv_tokens and -(-longest // size) > args.kv_tokens // size:
        raise UsageError(
            f"--kv-tokens is {args.kv_tokens:,}, and the longest request has {longest:,} tokens. "
            f"Use --kv-tokens {-(-longest // size) * size} or more, or leave out the requests that are longer, with --context"
        )
    return replace(rows, page_size=size, open_ended=getattr(args, "open_ended", False))

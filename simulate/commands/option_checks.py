"""Which options of a command line have no effect beside the others, and what its policies cannot tell apart.

An option is used or refused. The tables here are generators of rows: the names of options, and why they have no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import policies
from scheduling.policy import Policy
from simulate.rows import Rows
from terminal.options import UsageError, Values

Reasons = Iterable[tuple[str, str]]
UNLIMITED = "has no effect while KV memory is unlimited. Use --kv-tokens"


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
    "adapter": Hint(
        "", "the adapter", "adapter-affinity", "Simulated requests have none, so try it on a server with --adapter"
    ),
    "program": Hint("", "the program", "plas", "Use --workload agents"),
    "prefix": Hint(
        "", "the cached part of the prompt", "lpm",
        "Use --workload shared-prefix --kv-tokens 65536",
    ),
}  # fmt: skip


def refuse(args: Values, reasons: Reasons) -> None:
    """Raise UsageError for the first of these options that is on the command line."""
    for names, why in reasons:
        for name in names.split():
            if args.is_given(name):
                value = getattr(args, name)
                shown = "" if value is True else " " + _shown(value)
                raise UsageError(f"--{name.replace('_', '-')}{shown} {why}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_once(what: str, names: list[str]) -> None:
    """Reject a name that is given twice."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{what} {name} is given twice. Name it once")


def of_policies(args: Values, asked: Sequence[Policy], reported: Collection[str]) -> Reasons:
    """Yield the options that change nothing for these policies; hints in `reported` change what the command prints."""
    named = ", ".join(args.policies)
    for slots, some in groupby(asked, key=lambda policy: policy.slots):
        most = max(policy.max_batch_size for policy in some)
        if most < slots:
            why = f"has no effect: {named} never runs more than {most} at once. Leave it out"
            yield "max_batch_size slots", why
    ragged = [policy.max_batch_size for policy in asked if not policy.padded]
    if not ragged:
        yield "max_tokens_per_step", f"has no effect: {named} pads prompts and splits none. Leave it out"
        yield "acceptance", f"has no effect: {named} pads, and computes no draft tokens. Use dynamic"
    elif (most := max(ragged)) > args.max_tokens_per_step:
        why = f"is too few: {most} running requests compute a token each. Use {most} or more, or fewer slots"
        yield "max_tokens_per_step", why
    if getattr(args, "acceptance", None) is None:
        yield "drafts", "has no effect without draft tokens. Use --acceptance 0.7"
    known = {*policies.names(), *policies.order_names()}
    if not all(part in known for name in args.policies for part in name.split("+")):
        return  # a policy from a user's file may use any hint
    loop = args.policies[0].partition("+")[0]
    for hint, (option, words, order, _) in HINTS.items():
        if hint not in reported and not any(hint in policy.claims.uses for policy in asked):
            yield option, f"has no effect: {named} does not use {words}. Use {loop}+{order}, or leave it out"


def of_arrivals(args: Values, drawn: Rows, *, unit: bool, draws_more: bool) -> Reasons:
    """Yield the options that change nothing about requests that were `drawn` or read, before these get their hints.

    `unit` says that the command looks for a rate, and `draws_more` that it has another use for --seed than to draw
    requests.
    """
    if ":" in args.arrivals and not args.trace and not unit:
        yield "rate", f"has no effect on --arrivals {args.arrivals}, which have their own rate. Use --arrivals poisson"
    if args.trace:
        if args.is_given("rate") and not unit:
            yield "speed", "has no effect: --rate sets the rate. Leave one out"
        yield "workload arrivals", "has no effect with --trace. Leave one out"
        if not (draws_more or args.clients or args.priorities or args.slo):
            yield "seed", "has no effect: nothing in --trace is random. Leave it out"
    else:
        yield "speed", "requires --trace. Add it, or use --rate"
        if args.arrivals == "burst" and not unit:
            yield "rate", "has no effect: in a burst all arrive at once. Leave it out"
    if not drawn.closed:
        yield "open_loop", "has no effect: no requests are programs. Use --workload agents, or leave it out"
    if drawn.client:
        source = "--trace" if args.trace else f"--workload {args.workload}"
        yield "clients", f"has no effect: {source} names its clients. Leave it out"
    if drawn.priority:
        yield "priorities", "has no effect: --trace has priorities. Leave it out"
    if not args.kv_tokens:
        yield "page_size", f"{UNLIMITED} 65536"


def notes(args: Values, asked: Iterable[Policy], rows: Rows) -> Iterator[str]:
    """Yield notes about the requests, and about the orders that cannot tell them apart."""
    yield from rows.notes
    differ_in = rows.differ_in if args.kv_tokens else rows.differ_in - {"prefix"}
    for policy in {policy.name: policy for policy in asked}.values():
        uses = policy.claims.uses
        if uses and not differ_in & set(uses):
            hint = HINTS[uses[0]]
            yield f"{policy.name} orders by {hint.words}, which is the same for all these requests. {hint.remedy}"

"""Whether each option of a command line has an effect on the policies that are to run, and what they cannot tell apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import policies
from costs.cost import Aligned, Cost, Padded, Ragged
from costs.steps import decoding, prefilling
from scheduling.policy import Policy
from simulate.commands.arguments import refuse
from simulate.workloads import Rows
from terminal.options import UsageError, Values, read_pairs


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
    "prefix": Hint(
        "", "the cached part of the prompt", "lpm",
        "Use --workload shared-prefix --kv-tokens 65536",
    ),
}  # fmt: skip


def check_once(what: str, names: list[str]) -> None:
    """Reject a name that is given twice."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{what} {name} is given twice. Name it once")


def check_policies(args: Values, reported: Collection[str] = ()) -> list[Policy]:
    """Return the policies as they will run; reject options that none of them uses.

    The command's result reports the hints in `reported` for every policy.
    """
    check_once("policy", args.policies)
    chosen = read_pairs(args.policy_option, "--policy-option")
    named = ", ".join(args.policies)
    loops = {name.partition("+")[0] for name in args.policies}
    if "dynamic" in loops and chosen.get("reserve") == "prompt" and not getattr(args, "kv_tokens", True):
        raise UsageError(
            "--policy-option reserve=prompt has no effect while KV memory is unlimited. Use --kv-tokens 65536"
        )
    every: list[Policy] = []
    for slots in getattr(args, "slots", None) or [args.max_batch_size]:
        some = [policies.get_policy(name, max_batch_size=slots, options=chosen) for name in args.policies]
        if all(policy.max_batch_size < slots for policy in some):
            most = max(policy.max_batch_size for policy in some)
            why = f"has no effect: {named} never runs more than {most} at once. Leave it out"
            refuse(args, ("max_batch_size", "slots"), why)
        every += some
    _check_tokens_per_step(args, named, every)
    _check_speculation(args, named, every)
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


def _check_speculation(args: Values, named: str, every: Iterable[Policy]) -> None:
    if getattr(args, "acceptance", None) is None:
        refuse(args, ("drafts",), "has no effect without draft tokens. Use --acceptance 0.7")
    elif all(policy.padded for policy in every):
        refuse(args, ("acceptance",), f"has no effect: {named} pads, and computes no draft tokens. Use dynamic")


def _check_hints(args: Values, named: str, every: Sequence[Policy], reported: Collection[str]) -> None:
    known = {*policies.names(), *policies.order_names()}
    if not all(part in known for name in args.policies for part in name.split("+")):
        return  # a policy from a user's file may use any hint
    loop = args.policies[0].partition("+")[0]
    for hint, (option, words, order, _) in HINTS.items():
        if hint not in reported and not any(hint in policy.claims.heeds for policy in every):
            why = f"has no effect: {named} does not use {words}. Use {loop}+{order}, or leave it out"
            refuse(args, (option,), why)


def notes(args: Values, chosen: Iterable[Policy], rows: Rows) -> Iterator[str]:
    """Yield notes about the requests, and about the orders that cannot tell them apart."""
    yield from rows.notes
    differ_in = rows.differ_in if args.kv_tokens else rows.differ_in - {"prefix"}
    for policy in {policy.name: policy for policy in chosen}.values():
        heeds = policy.claims.heeds
        if heeds and not differ_in & set(heeds):
            hint = HINTS[heeds[0]]
            yield f"{policy.name} orders by {hint.words}, which is the same for all these requests. {hint.remedy}"


def check_engine(args: Values, cost: Cost, chosen: Iterable[Policy]) -> None:
    """Reject an --engine that changes the time of no step of these policies."""
    uneven = decoding(2, 100, 64)
    if isinstance(cost, Aligned) and cost.seconds(uneven) == cost.law.seconds(uneven):
        why = f"has no effect: {args.cost} takes the same time for all contexts. Use another --cost"
        refuse(args, ("engine",), why)
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

"""Check a policy on random cases: the command line."""

from __future__ import annotations

import textwrap

from rich.console import Console

import policies
from scheduling.reservations import ENDLESS
from simulate.commands.arguments import Sections, pairs
from simulate.commands.option_checks import refuse
from simulate.laws.check import CASES, LARGE_CASES, Verdict, check, check_exhaustively
from simulate.laws.exhaustive import DEFAULT_SCOPE, Scope
from terminal.options import Argument, Command, Number, Option, UsageError, Values, read_pairs
from terminal.progress import counted

DESCRIPTION = """\
Test a policy on thousands of small random cases and some large ones. Report
which law it breaks, with the smallest case that shows it.

Small cases have up to 5 slots, prompts of 12 tokens and 80 requests; large ones
64 slots, prompts of up to 2,000 tokens and 1,000 requests. The laws, among
others: no request is lost, and each gets exactly its tokens; slots, KV pages
and the tokens of a step stay within their limits; no slot is idle while a
request fits; a second run gives the same result. A policy says in its claims
what else it promises, as that no request waits too long, and may do
(scheduling/claims.py).
"""
EXIT_STATUS = """\
exit status: 0 when every law is kept, 1 when one is broken, 2 when the policy
or an option does not exist, or the policy's file is wrong."""


def describe_options() -> str:
    """Return the options of all policies and orders in lines for people, each with the policies that have it."""
    owners: dict[tuple[str, ...], dict[str, list[str]]] = {}
    names = {name: name for name in policies.names()}
    names |= {f"nobatch+{name}": name for name in policies.order_names()}
    for full, name in names.items():
        for field in policies.form_of(full):
            defaults = owners.setdefault(tuple(str(field[key]) for key in ("name", "help", "bounds")), {})
            defaults.setdefault(str(field["default"]), []).append(name)
    lines = []
    for (option, help, bounds), defaults in sorted(owners.items()):
        named = {"": "none", str(ENDLESS): "no limit"}
        known = "; ".join(f"{named.get(value, value)} in {', '.join(of)}" for value, of in defaults.items())
        text = f"{option}: {help} ({bounds}). Default: {known}"
        lines.append(textwrap.fill(text, 79, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False))
    return "\n".join(lines)


def build_command() -> Command:
    """Return the command line."""
    sections: Sections = {
        "arguments": [Argument("policy", "a policy name, loop+order, the path of a file, or a dotted module name",
                               required=True)],
        "options": [
            Option("--cases", "number of small cases to test", Number(0), default=CASES),
            Option("--large-cases", "number of large cases to test", Number(0), default=LARGE_CASES),
            Option("--exhaustive", f"instead of random cases, test {DEFAULT_SCOPE}", None),
            Option("--requests", "with --exhaustive: maximum number of requests", Number(1, 6), default=DEFAULT_SCOPE.requests),
            Option("--longest", "with --exhaustive: maximum tokens of a prompt or an answer", Number(1, 9), default=DEFAULT_SCOPE.longest),
            Option("--seed", "seed of the random cases", Number(0), default=0),
            pairs("--policy-option", "an option of the policy, as listed below; may be repeated"),
        ],
    }  # fmt: skip
    more = {"": EXIT_STATUS, "options of the policies, for --policy-option": f"\b\n{describe_options()}"}
    return Command("./eb simulate check", DESCRIPTION, sections, more)


def run(args: Values, console: Console) -> Verdict:
    """Test the policy."""
    if not args.cases + args.large_cases:
        raise UsageError("--cases 0 and --large-cases 0 leave no case to test. Use --cases 100")
    values = read_pairs(args.policy_option, "--policy-option")
    if args.exhaustive:
        refuse(args, [("cases large_cases seed", "has no effect with --exhaustive. Leave one out")])
        with counted(console, None, "runs so far") as progress:
            return check_exhaustively(args.policy, Scope(args.requests, args.longest), values, progress)
    refuse(args, [("requests longest", "has no effect without --exhaustive. Add it")])
    with counted(console, args.cases + args.large_cases, "cases tested") as progress:
        return check(args.policy, args.cases, args.seed, values, large=args.large_cases, progress=progress)

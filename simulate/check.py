"""Try a policy on thousands of small random cases and some large ones, and report in plain words which law it breaks.

`check("dynamic+vtc")` or `check("path/to/my_policy.py")`. The laws are in `laws.py` and `purity.py`, the cases in
`cases.py`. Small cases come first; they are quick and easy to read. Large cases find what shows only after many joins,
with many running, or in long prompts. The case that breaks a law is made as small as it gets (`shrink.py`).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console

import policies
from client.options import Argument, Command, Number, Option, Parameter, UsageError, read
from client.progress import counted
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate.arguments import pairs, read_pairs
from simulate.case import Case
from simulate.cases import describe, make_cases, make_large_cases
from simulate.laws import Broken
from simulate.purity import check_purity
from simulate.shrink import Shrinker
from simulate.trial import try_case

CASES = 2000
LARGE_CASES = 8
TWICE = 4  # one small case in this many runs twice, to see whether the second run equals the first


DESCRIPTION = """\
Test a policy on thousands of small random cases and some large ones. Report
which law it breaks, with the smallest case that shows it.

Small cases have up to 5 slots, prompts of 12 tokens and 80 requests; large ones
64 slots, prompts of up to 2,000 tokens and 1,000 requests. The laws, among
others: every request gets exactly its tokens and one outcome; slots, KV pages
and the tokens of a step stay within their limits; no slot is idle while a
request fits; no request starves; a second run gives the same result. A policy
says in its claims what else it promises and may do (scheduling/claims.py).
"""
EXIT_STATUS = """\
exit status: 0 when every law is kept, 1 when one is broken, 2 when the policy
or an option does not exist."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Verdict:
    """What came of a check: `broken` and the smallest `case` found, or neither; `cases` and `large` were tried."""

    policy: str
    cases: int
    large: int = 0
    broken: Broken | None = None
    case: Case | None = None

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.policy} keeps every law in {self.cases:,} small and {self.large:,} large cases"
        lines = [f"{self.policy} breaks a law ({self.broken.law}): {self.broken.words}"]
        if self.case is not None:
            which = f"large case {self.large:,}" if self.large else f"small case {self.cases:,}"
            lines += ["", f"the smallest case found that shows it, reduced from {which}:"]
            lines += describe(self.case)
        return "\n".join(lines)


def check(
    name: str,
    cases: int = CASES,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    large: int = LARGE_CASES,
    progress: Progress | None = None,
) -> Verdict:
    """Test the policy with this name, or in this file, on `cases` and `large` cases; ValueError if it does not exist."""

    maker = policies.policy_maker(name)

    def make(slots: int) -> Policy:
        return maker(slots, options)

    try:
        check_purity(make(4))
    except Broken as broken:
        return Verdict(name, 0, 0, broken)
    every_case = chain(make_cases(cases, seed), make_large_cases(large, seed))
    for number, case in enumerate(every_case, 1):
        try:
            try_case(make, case, make_scheduler, number % TWICE == 0 or number > cases)
        except Broken as broken:
            smallest = Shrinker(make, make_scheduler, case, broken).run()
            return Verdict(name, min(number, cases), max(0, number - cases), *smallest)
        if progress is not None:
            progress(number)
    return Verdict(name, cases, large)


def describe_options() -> str:
    """Return the options of all policies and orders in lines for people, each with the policies that have it."""
    owners: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    names = {name: name for name in policies.names()}
    names |= {f"nobatch+{name}": name for name in policies.order_names()}
    for full, name in names.items():
        for item in policies.describe(full):
            defaults = owners.setdefault((item.option, item.help, item.bounds), {})
            defaults.setdefault(item.default, []).append(name)
    lines = []
    for (option, help, bounds), defaults in sorted(owners.items()):
        known = "; ".join(f"{value or 'none'} in {', '.join(of)}" for value, of in defaults.items())
        text = f"{option}: {help} ({bounds}). Default: {known}"
        lines.append(textwrap.fill(text, 79, initial_indent="  ", subsequent_indent="      "))
    return "\n".join(lines)


def build_command() -> Command:
    """Return the command line."""
    sections: dict[str, Sequence[Parameter]] = {
        "arguments": [Argument("policy", "a policy name, loop+order, the path of a file, or a dotted module name",
                               required=True)],
        "options": [
            Option("--cases", "number of small cases to test", Number(0), default=CASES),
            Option("--large-cases", "number of large cases to test", Number(0), default=LARGE_CASES),
            Option("--seed", "seed of the random cases", Number(0), default=0),
            pairs("--policy-option", "an option of the policy, as listed below; may be repeated"),
        ],
    }  # fmt: skip
    more = {"": EXIT_STATUS, "options of the policies, for --policy-option": f"\b\n{describe_options()}"}
    return Command("python -m simulate check", DESCRIPTION, sections, more)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0 when every law is kept, 1 when one is broken, 2 when there is no such policy."""
    try:
        args = read(build_command(), sys.argv[1:] if argv is None else argv)
        if not args.cases + args.large_cases:
            raise UsageError("--cases 0 and --large-cases 0 leave no case to test. Use --cases 100")
        values = read_pairs(args.policy_option, "--policy-option")
        with counted(Console(stderr=True), args.cases + args.large_cases, "cases tested") as progress:
            verdict = check(args.policy, args.cases, args.seed, values, large=args.large_cases, progress=progress)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{verdict}\n")
    return 0 if verdict.broken is None else 1

"""Try a policy on thousands of small random cases and some large ones, and report in plain words which law it breaks.

`check("dynamic+vtc")` or `check("path/to/my_policy.py")`. The laws are in `laws.py` and `purity.py`. The cases come from
a generator of our own, so that a seed gives the same ones everywhere. Small cases (up to 5 slots, prompts of up to 12
tokens, 80 requests) come first; they are quick and easy to read. Large cases (64 slots, prompts of up to 2,000 tokens,
1,000 requests) find what shows only after many joins, with many running, or in long prompts. The case that breaks a law
is made as small as it gets.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import policies
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate.arguments import Parser, UsageError, options, whole
from simulate.laws import Broken, Case, Request, try_case
from simulate.purity import check_purity

CASES = 2000
LARGE_CASES = 8
TWICE = 4  # every so many small cases are run twice, to see whether the second run is the same
EFFORT = 300_000  # requests and tokens that are served again at most to make a case smaller
LINES = 24  # of a case that are printed at most
ENDLESS = 1 << 60

LONGEST_PROMPT, MOST_SLOTS, MOST_REQUESTS = 2000, 64, 1000  # of large cases

DESCRIPTION = """\
Try a policy on thousands of small random cases and some large ones, and report
in plain words which law it breaks, with the smallest case that shows it.

Small cases have up to 5 slots, prompts of 12 tokens and 80 requests; large ones
64 slots, prompts of up to 2,000 tokens and 1,000 requests. The laws, among
others: every request gets exactly its tokens and one outcome; slots, KV pages
and the tokens of a step stay within their limits; no slot is idle while a
request fits; nobody starves; a second run is the same as the first. A policy
declares which of them it does not promise (scheduling/policy.py).
"""
EXIT_STATUS = """\
exit status: 0 when every law is kept, 1 when one is broken, 2 when the policy
or an option does not exist."""

Make = Callable[[int], Policy]
Progress = Callable[[int, int], None]


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
            lines += ["", f"the smallest case found that shows it, made from {which}:"]
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
    """Try the policy called `name`, or in that file, on so many cases; ValueError when there is none."""

    def make(slots: int) -> Policy:
        return policies.get_policy(name, slots, options)

    try:
        check_purity(make(4))
    except Broken as broken:
        return Verdict(name, 0, 0, broken)
    every_case = chain(make_cases(cases, seed), make_large_cases(large, seed))
    for number, case in enumerate(every_case, 1):
        try:
            try_case(make, case, make_scheduler, number % TWICE == 0 or number > cases)
        except Broken as broken:
            found = Shrinker(make, make_scheduler, case, broken).run()
            return Verdict(name, min(number, cases), max(0, number - cases), *found)
        if progress is not None:
            progress(number, cases + large)
    return Verdict(name, cases, large)


def make_cases(n: int, seed: int) -> Iterator[Case]:
    """Yield n small random cases: mostly a few requests in little room, some with clients that always have more."""
    for number in range(n):
        rng = random.Random(f"{seed}:{number}")
        requests = _rivals(rng) if number % 8 == 7 else _few(rng)
        pages = None
        if rng.random() < 0.5:
            size = rng.randint(1, 5)
            least = -(-max(len(r.prompt) + r.output for r in requests) // size) + 1
            pages = (rng.randint(least, 3 * least), size)
        cancels = [(rng.randint(0, 25), rng.randint(0, 9)) for _ in range(rng.choice((0, 0, 1, 3)))]
        yield Case(
            tuple(requests),
            slots=rng.randint(1, 5) if number % 8 != 7 else rng.randint(1, 2),
            budget=rng.choice((1 << 30, rng.randint(1, 12))),
            pages=pages if number % 8 != 7 else None,
            prefix_cache=rng.random() < 0.5,
            drains=rng.random() < 0.5,
            cancels=tuple(cancels) if number % 8 != 7 else (),
        )


def _few(rng: random.Random) -> list[Request]:
    now, requests = 0, []
    for _ in range(rng.randint(1, 10)):
        now += rng.choice((0, 0, rng.randint(0, 40), rng.randint(0, 200)))
        prompt = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 12)))
        deadline = now + rng.randint(0, 200) if rng.random() < 0.5 else None
        requests.append(
            Request(now, prompt, rng.randint(1, 8), rng.choice("aab"), rng.randint(0, 2), deadline)
        )
    return requests


def _rivals(rng: random.Random) -> list[Request]:
    """Return the requests of two clients with many each, of other shapes, of whom one may come later or rest."""
    shapes = [(12, 1), (1, 8), (6, 3)]
    rng.shuffle(shapes)
    requests = []
    for client, (prompt, output) in zip("ab", shapes):
        start = rng.choice((0, 600)) if client == "b" else 0
        rest = rng.choice((0, 0, 400))
        for i in range(40):
            at = start + (rest if i >= 10 else 0)
            requests.append(
                Request(at, (0,) * rng.randint(1, prompt), rng.randint(1, output), client)
            )
    return sorted(requests, key=lambda r: r.arrival)


def make_large_cases(n: int, seed: int) -> Iterator[Case]:
    """Yield n large random cases; four in a row have all their requests at once, too many, about enough, and few."""
    for number in range(n):
        rng = random.Random(f"{seed}:large:{number}")
        requests = _crowd(rng, mean_gap=(0, 60, 130, 400)[number % 4])
        pages = None
        if number % 3 == 1:
            size = 16
            least = -(-max(len(r.prompt) + r.output for r in requests) // size) + 1
            pages = (rng.randint(least, 4 * least), size)
        yield Case(
            tuple(requests),
            slots=MOST_SLOTS,
            budget=rng.choice((64, 128, 512)) if number % 8 < 4 else ENDLESS,
            pages=pages,
            prefix_cache=rng.random() < 0.5,
            drains=rng.random() < 0.5,
            cancels=tuple(
                (rng.randint(0, 800), rng.randint(0, 199)) for _ in range(30 * (number % 2))
            ),
        )


def _crowd(rng: random.Random, mean_gap: float) -> list[Request]:
    """Return many requests, most of them short, of three clients whose prompts begin alike."""
    now = 0
    requests = []
    longest = rng.randrange(MOST_REQUESTS)  # whose prompt has all the tokens that a prompt may have
    for i in range(MOST_REQUESTS):
        now += round(rng.expovariate(1 / mean_gap)) if mean_gap else 0
        most = rng.choices((30, 300, LONGEST_PROMPT), (70, 25, 5))[0]
        prompt = LONGEST_PROMPT if i == longest else rng.randint(1, most)
        output = rng.randint(1, 64 if rng.random() < 0.05 else 8)
        client = rng.choice("aab") if rng.random() < 0.9 else "c"
        deadline = now + rng.randint(0, 5000) if rng.random() < 0.5 else None
        requests.append(
            Request(now, (ord(client),) * prompt, output, client, rng.randint(0, 2), deadline)
        )
    return requests


def effort(case: Case) -> int:
    """Return about how much work it is to try a case."""
    return sum(2 + r.output + len(r.prompt) // 32 for r in case.requests)


class Shrinker:
    """Takes away from a case that breaks a law whatever can go while the same law is broken."""

    def __init__(
        self, make: Make, make_scheduler: Callable[..., Scheduler], case: Case, broken: Broken
    ) -> None:
        self.make = make
        self.make_scheduler = make_scheduler
        self.case = case
        self.broken = broken
        self.left = EFFORT
        self.tried = {
            case
        }  # requests that are alike can be left out in many ways that are the same case

    def run(self) -> tuple[Broken, Case]:
        """Return how the smallest case found breaks the law, and that case."""
        many = len(self.case.requests)
        for finest in (many // 4, many // 32):
            self._simplify_all(max(1, finest))
        before = None
        while before is not self.case:
            before = self.case
            self._simplify_all(1)
            for i in range(len(self.case.requests)):
                self._simplify(lambda case, i=i: _simpler_request(case, i))
        return self.broken, self.case

    def _simplify_all(self, finest: int) -> None:
        """Leave requests out, at first half of them and at last `finest` at a time; then simplify those that are left."""
        size = max(1, len(self.case.requests) // 2)
        while size >= finest:
            start = 0
            while start < len(self.case.requests):
                requests = self.case.requests
                rest = requests[:start] + requests[start + size :]
                if not rest or not self._still_breaks(
                    dataclasses.replace(self.case, requests=rest)
                ):
                    start += size
            size //= 2
        self._simplify(_simpler_requests)
        self._simplify(_simpler_room)

    def _simplify(self, simpler: Callable[[Case], Iterator[Case]]) -> None:
        while any(self._still_breaks(case) for case in simpler(self.case)):
            pass

    def _still_breaks(self, case: Case) -> bool:
        """Whether a simpler case breaks the same law; it is the one to go on from then."""
        if case in self.tried or self.left <= 0:
            return False
        self.tried.add(case)
        self.left -= effort(case)
        try:
            try_case(self.make, case, self.make_scheduler, self.broken.law == "the same again")
        except Broken as again:
            if again.law == self.broken.law:
                self.case, self.broken = case, again
                return True
        return False


def _simpler_room(case: Case) -> Iterator[Case]:
    """Yield cases with fewer cancellations and limits, or fewer slots."""

    def but(**changes: object) -> Case:
        return dataclasses.replace(case, **changes)  # type: ignore[arg-type]

    if case.cancels:
        yield but(cancels=())
        yield from (
            but(cancels=case.cancels[:i] + case.cancels[i + 1 :]) for i in range(len(case.cancels))
        )
    if case.pages:
        yield but(pages=None, prefix_cache=False)
    if case.budget < ENDLESS:
        yield but(budget=ENDLESS)
    yield from (
        but(slots=slots) for slots in (1, 2, 3, 4, case.slots // 2) if 0 < slots < case.slots
    )
    if case.slots > 1:
        yield but(slots=case.slots - 1)


def _simpler_requests(case: Case) -> Iterator[Case]:
    """Yield cases in which all requests are simpler in one respect."""
    changes: list[Callable[[Request], dict[str, object]]] = [
        lambda r: {"arrival": 0},
        lambda r: {"prompt": r.prompt[:1]},
        lambda r: {"output": 1},
        lambda r: {"client": "a"},
        lambda r: {"priority": 0},
        lambda r: {"deadline": None},
        lambda r: {"arrival": r.arrival // 2},
        lambda r: {"prompt": r.prompt[: (len(r.prompt) + 1) // 2]},
        lambda r: {"output": (r.output + 1) // 2},
    ]
    for change in changes:
        requests = (dataclasses.replace(r, **change(r)) for r in case.requests)  # type: ignore[arg-type]
        yield dataclasses.replace(case, requests=tuple(requests))


def _simpler_request(case: Case, i: int) -> Iterator[Case]:
    """Yield cases in which one request asks for less. Arrivals only move to the beginning."""
    request = case.requests[i]
    size, output = len(request.prompt), request.output
    changes: list[dict[str, object]] = [
        {"prompt": request.prompt[: max(1, size // 2)]},
        {"prompt": request.prompt[: max(1, size - 1)]},
        {"output": max(1, output // 2)},
        {"output": max(1, output - 1)},
        {"arrival": 0},
        {"arrival": request.arrival // 2},
        {"deadline": None, "priority": 0, "client": "a"},
    ]
    for change in changes:
        simpler = dataclasses.replace(request, **change)  # type: ignore[arg-type]
        requests = (*case.requests[:i], simpler, *case.requests[i + 1 :])
        yield dataclasses.replace(case, requests=requests)


def describe(case: Case) -> list[str]:
    """Return a case in lines for people; requests that are alike share a line."""
    pages = f", {case.pages[0] - 1} KV pages of {case.pages[1]} tokens" if case.pages else ""
    budget = f", {case.budget} tokens a step" if case.budget < ENDLESS else ""
    lines = [f"  {case.slots} slots{budget}{pages}; a step takes 10 + prompt tokens + 2 x decodes"]
    groups = [
        (text, [i for i, _ in group])
        for text, group in groupby(enumerate(map(_shape, case.requests)), key=lambda pair: pair[1])
    ]
    shown = groups if len(groups) <= LINES else groups[: LINES - 1]
    for text, numbers in shown:
        first, last = numbers[0], numbers[-1]
        who = f"r{first} arrives" if first == last else f"r{first} to r{last} arrive"
        lines.append(f"  {who} at {text}")
    rest = case.requests[shown[-1][1][-1] + 1 :]
    if rest:
        prompts, outputs = [len(r.prompt) for r in rest], [r.output for r in rest]
        lines.append(
            f"  and {len(rest)} more, the last at {rest[-1].arrival}: prompts of {min(prompts)} to "
            f"{max(prompts)} tokens, outputs of {min(outputs)} to {max(outputs)}"
        )
    lines += [
        f"  before step {step + 1}, number {index} of those waiting and running is cancelled"
        for step, index in case.cancels[:LINES]
    ]
    return lines


def _shape(r: Request) -> str:
    priority = f", priority {r.priority}" if r.priority else ""
    deadline = f", deadline {r.deadline:g}" if r.deadline is not None else ""
    return (
        f"{r.arrival}: prompt {len(r.prompt)}, output {r.output}, client {r.client}"
        f"{priority}{deadline}"
    )


def describe_options() -> str:
    """Return the options of all policies and orders in lines for people, each with the policies that have it."""
    owners: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    names = {name: name for name in policies.names()}
    names |= {f"dynamic+{name}": name for name in policies.order_names()}
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


class Line:
    """A line on a terminal that shows how far the check is."""

    def __init__(self) -> None:
        self.shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self.shown + 0.2:
            self.shown = now
            sys.stderr.write(f"\r{done:,} of {total:,} cases tried")
            sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[K")


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="python -m simulate check",
        description=DESCRIPTION,
        epilog=f"{EXIT_STATUS}\n\noptions of the policies, for --policy-option:\n{describe_options()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("policy", help="a name, loop+order, the path of a file, or a dotted module")
    counts = {"--cases": (CASES, "small"), "--large-cases": (LARGE_CASES, "large")}
    for flag, (default, kind) in counts.items():
        made.add_argument(
            flag,
            type=whole(0),
            default=default,
            metavar="N",
            help=f"{kind} cases to try (default %(default)s)",
        )
    made.add_argument("--seed", type=whole(0), default=0, help="of the cases (default %(default)s)")
    made.add_argument(
        "--policy-option", action="append", default=[], metavar="NAME=VALUE",
        help="an option of the policy, listed below; may be repeated",
    )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0 when every law is kept, 1 when one is broken, 2 when there is no such policy."""
    line = Line() if sys.stderr.isatty() else None
    try:
        args = parser().parse_args(argv)
        if not args.cases + args.large_cases:
            raise UsageError("--cases 0 and --large-cases 0 leave no case to try. Use --cases 100")
        given = options(args.policy_option, "--policy-option")
        verdict = check(
            args.policy, args.cases, args.seed, given, large=args.large_cases, progress=line
        )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        if line is not None:
            line.clear()
    sys.stdout.write(f"{verdict}\n")
    return 0 if verdict.broken is None else 1

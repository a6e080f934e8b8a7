"""Try a policy on thousands of small random cases, and say in plain words which law it breaks.

`check("dynamic+vtc")` or `check("path/to/my_policy.py")`. The laws are in `laws.py` and `purity.py`; the cases come from a
generator of our own, so that a seed gives the same ones everywhere, and the case that breaks a law is made as small as
it gets.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import policies
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from simulate.arguments import Parser, options, whole
from simulate.laws import Broken, Case, Request, try_case
from simulate.purity import check_purity

CASES = 2000
SHRINKS = 1000  # tries at most to make a case smaller

Make = Callable[[int], Policy]


@dataclass(frozen=True)
class Verdict:
    """What came of a check: `broken` and the smallest `case` found, or neither."""

    policy: str
    cases: int
    broken: Broken | None = None
    case: Case | None = None

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.policy} keeps every law in {self.cases:,} cases"
        lines = [f"{self.policy} breaks a law ({self.broken.law}): {self.broken.words}"]
        if self.case is not None:
            lines += [
                "",
                f"the smallest case found, the {self.cases:,}th tried:",
                *_told(self.case),
            ]
        return "\n".join(lines)


def check(
    name: str,
    cases: int = CASES,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
) -> Verdict:
    """Try the policy called `name`, or in that file, on so many cases; ValueError when there is none."""

    def make(slots: int) -> Policy:
        return policies.get_policy(name, slots, options)

    try:
        check_purity(make(4))
    except Broken as broken:
        return Verdict(name, 0, broken)
    for number, case in enumerate(make_cases(cases, seed), 1):
        try:
            try_case(make, case, make_scheduler)
        except Broken as broken:
            case, broken = shrink(make, case, broken, make_scheduler)
            return Verdict(name, number, broken, case)
    return Verdict(name, cases)


def make_cases(n: int, seed: int) -> Iterator[Case]:
    """Yield n random cases: mostly a few requests in little room, some with clients that always have more."""
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


def shrink(
    make: Make, case: Case, broken: Broken, make_scheduler: Callable[..., Scheduler] = Scheduler
) -> tuple[Case, Broken]:
    """Return the smallest case found that breaks the same law, and how it does."""
    tries, found = 0, True
    while found:
        found = False
        for smaller in _smaller(case):
            tries += 1
            if tries > SHRINKS:
                return case, broken
            try:
                try_case(make, smaller, make_scheduler, broken.law == "the same again")
            except Broken as again:
                if again.law == broken.law:
                    case, broken, found = smaller, again, True
                    break
    return case, broken


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with less in them, those with much less first."""

    def but(**changes: object) -> Case:
        return dataclasses.replace(case, **changes)  # type: ignore[arg-type]

    requests = case.requests
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            rest = requests[:start] + requests[start + size :]
            if rest:
                yield but(requests=rest)
        size //= 2
    if case.cancels:
        yield but(cancels=())
        yield from (
            but(cancels=case.cancels[:i] + case.cancels[i + 1 :]) for i in range(len(case.cancels))
        )
    if case.pages:
        yield but(pages=None, prefix_cache=False)
    if case.budget < 1 << 30:
        yield but(budget=1 << 30)
    yield from (but(slots=slots) for slots in range(1, case.slots))
    for i, request in enumerate(requests):
        for simpler in _simpler(request):
            yield but(requests=(*requests[:i], simpler, *requests[i + 1 :]))


def _simpler(request: Request) -> Iterator[Request]:
    """Yield requests that ask for less. Arrivals stay in order, since they only move to the beginning."""
    if len(request.prompt) > 1:
        yield dataclasses.replace(request, prompt=request.prompt[: len(request.prompt) // 2])
        yield dataclasses.replace(request, prompt=request.prompt[:-1])
    if request.output > 1:
        yield dataclasses.replace(request, output=request.output // 2)
        yield dataclasses.replace(request, output=request.output - 1)
    if request.arrival:
        yield dataclasses.replace(request, arrival=0)
        yield dataclasses.replace(request, arrival=request.arrival // 2)
    if request.deadline is not None or request.priority or request.client != "a":
        yield dataclasses.replace(request, deadline=None, priority=0, client="a")


def _told(case: Case) -> list[str]:
    """Return a case in lines for people."""
    pages = f", {case.pages[0] - 1} KV pages of {case.pages[1]} tokens" if case.pages else ""
    budget = f", {case.budget} tokens a step" if case.budget < 1 << 30 else ""
    lines = [f"  {case.slots} slots{budget}{pages}; a step takes 10 + prompt tokens + 2 x decodes"]
    for i, r in enumerate(case.requests):
        extra = f", client {r.client}" + (f", priority {r.priority}" if r.priority else "")
        extra += f", deadline {r.deadline:g}" if r.deadline is not None else ""
        lines.append(
            f"  r{i} arrives at {r.arrival}: prompt {len(r.prompt)}, output {r.output}{extra}"
        )
    lines += [
        f"  before step {step + 1}, the {index}th inside is cancelled"
        for step, index in case.cancels
    ]
    return lines


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(prog="python -m simulate check", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("policy", help="a name, loop+order, the path of a file, or a dotted module")
    made.add_argument(
        "--cases", type=whole(1), default=CASES, help="cases to try (default %(default)s)"
    )
    made.add_argument("--seed", type=whole(0), default=0, help="of the cases (default %(default)s)")
    made.add_argument(
        "--policy-option", action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0 when every law is kept, 1 when one is broken, 2 when there is no such policy."""
    try:
        args = parser().parse_args(argv)
        given = options(args.policy_option, "--policy-option")
        verdict = check(args.policy, args.cases, args.seed, given)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{verdict}\n")
    return 0 if verdict.broken is None else 1

"""Random cases to try a policy on, from a generator of our own, so that a seed gives the same ones everywhere.

It must not know laws, or what a policy does with a case.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import groupby

from simulate.laws.case import ENDLESS, Case, Request

LONGEST_PROMPT, LONGEST_OUTPUT, MOST_SLOTS, MOST_REQUESTS = 2000, 1000, 64, 1000  # of large cases
RIVALS, FEWER_RIVALS = 40, 12  # requests of a client that has more than its share
LINES = 24  # of a case that are printed at most


def make_cases(n: int, seed: int, rivals: int = RIVALS) -> Iterator[Case]:
    """Yield n small random cases: mostly a few requests in little room, some with two clients that send `rivals` each."""
    for number in range(n):
        rng = random.Random(f"{seed}:{number}")
        requests = _rivals(rng, rivals) if number % 8 == 7 else _few(rng)
        pages = None
        if rng.random() < 0.5:
            size = rng.randint(1, 5)
            least = -(-max(len(r.prompt) + r.output for r in requests) // size) + 1
            pages = (rng.randint(least, 3 * least), size)
        cancels = [(rng.randint(0, 25), rng.randint(0, 9)) for _ in range(rng.choice((0, 0, 1, 3)))]
        yield Case(
            _varied(requests, f"{seed}:{number}"),
            margin=rng.choice((1, 1, 3, 64)),
            slots=rng.randint(1, 5) if number % 8 != 7 else rng.randint(1, 2),
            budget=rng.choice((ENDLESS, rng.randint(1, 12))),
            pages=pages if number % 8 != 7 else None,
            prefix_cache=rng.random() < 0.5,
            drains=rng.random() < 0.5,
            cancels=tuple(cancels) if number % 8 != 7 else (),
            drafts=_drafts(random.Random(f"{seed}:{number}:drafts")) if number % 8 != 7 else None,
        )


def _drafts(rng: random.Random) -> tuple[int, int] | None:
    """Return how draft tokens are proposed, in half of the cases not at all."""
    return rng.choice((None, (rng.randint(0, 5), rng.choice((1, 2, 3, 7)))))


def _few(rng: random.Random) -> list[Request]:
    now, requests = 0, []
    for _ in range(rng.randint(1, 10)):
        now += rng.choice((0, 0, rng.randint(0, 40), rng.randint(0, 200)))
        prompt = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 12)))
        deadline = now + rng.randint(0, 200) if rng.random() < 0.5 else None
        requests.append(Request(now, prompt, rng.randint(1, 8), rng.choice("aab"), rng.randint(0, 2), deadline))
    return requests


def _varied(requests: list[Request], seed: str) -> tuple[Request, ...]:
    """Return the requests: none, about half or all of a case are open-ended, have adapters or have programs."""
    ends, adapters = random.Random(f"{seed}:open"), random.Random(f"{seed}:adapter")
    programs = random.Random(f"{seed}:program")
    named = programs.choice((0.0, 0.5, 1.0))
    share, adapted = ends.choice((0.0, 0.5, 1.0)), adapters.choice((0.0, 0.5, 1.0))
    return tuple(
        dataclasses.replace(
            request,
            open_ended=ends.random() < share,
            adapter=adapters.choice("xyz") if adapters.random() < adapted else "",
            program=programs.choice("pqr") if programs.random() < named else "",
        )
        for request in requests
    )


def _rivals(rng: random.Random, count: int) -> list[Request]:
    """Return many requests of two clients with different shapes; one client may begin later or pause."""
    shapes = [(12, 1), (1, 8), (6, 3)]
    rng.shuffle(shapes)
    requests = []
    for client, (prompt, output) in zip("ab", shapes):
        start = rng.choice((0, 600)) if client == "b" else 0
        rest = rng.choice((0, 0, 400))
        for i in range(count):
            at = start + (rest if i >= 10 else 0)
            requests.append(Request(at, (0,) * rng.randint(1, prompt), rng.randint(1, output), client))
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
            _varied(requests, f"{seed}:large:{number}"),
            margin=8,
            slots=MOST_SLOTS,
            budget=rng.choice((64, 128, 512)) if number % 8 < 4 else ENDLESS,
            pages=pages,
            prefix_cache=rng.random() < 0.5,
            drains=rng.random() < 0.5,
            cancels=tuple((rng.randint(0, 800), rng.randint(0, 199)) for _ in range(30 * (number % 2))),
            drafts=(4, 3) if number % 4 == 3 else None,
        )


def _crowd(rng: random.Random, mean_gap: float) -> list[Request]:
    """Return many requests, most of them short, of three clients whose prompts begin alike."""
    now = 0
    requests = []
    longest = rng.randrange(MOST_REQUESTS)  # whose prompt and answer have all the tokens that they may have
    for i in range(MOST_REQUESTS):
        now += round(rng.expovariate(1 / mean_gap)) if mean_gap else 0
        most = rng.choices((30, 300, LONGEST_PROMPT), (70, 25, 5))[0]
        prompt = LONGEST_PROMPT if i == longest else rng.randint(1, most)
        output = rng.randint(1, 64 if rng.random() < 0.05 else 8)
        output = LONGEST_OUTPUT if i == longest else output
        client = rng.choice("aab") if rng.random() < 0.9 else "c"
        deadline = now + rng.randint(0, 5000) if rng.random() < 0.5 else None
        requests.append(Request(now, (ord(client),) * prompt, output, client, rng.randint(0, 2), deadline))
    return requests


def describe(case: Case) -> list[str]:
    """Return a case in lines for people; requests that are alike share a line."""
    pages = f", {case.pages[0] - 1} KV pages of {case.pages[1]} tokens, a margin of {case.margin}" if case.pages else ""
    budget = f", {case.budget} tokens a step" if case.budget < ENDLESS else ""
    drafts = ""
    if case.drafts is not None:
        number, every = case.drafts
        drafts = f", {number or 'a chosen number of'} draft tokens for each request, one of {every} wrong"
    lines = [
        f"  {case.slots} slot{'s' * (case.slots > 1)}{budget}{pages}{drafts}; a step takes 10 + prompt tokens + 2 x decodes"
    ]
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
    ends = ", open-ended" if r.open_ended else ""
    adapter = f", adapter {r.adapter}" if r.adapter else ""
    program = f", program {r.program}" if r.program else ""
    who = f"client {r.client}{adapter}{program}"
    return f"{r.arrival}: prompt {len(r.prompt)}, output {r.output}, {who}{priority}{deadline}{ends}"

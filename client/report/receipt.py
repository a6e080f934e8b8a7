"""What two policies in alternating windows of live traffic show: the receipt of an experiment.

Requests and windows go in, a plain dictionary comes out. It must not know clocks, files or servers: an experiment on the
simulator's clock is judged by the same code as one on a server.

Each pair of windows has both policies, in an order that was drawn. If they do not differ, drawing the other order would have
exchanged the two figures of the pair and nothing else, whatever the load did: neither a drift nor a burst can look like an
effect. The interval needs no more than that. It is made of the ratios of subsets of the pairs: the true ratio lies between
any two neighbors of them with the same probability (Hartigan, "Using subsample values as typical values", 1969).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .measure import Outcome, meets

GOAL = "E2E mean"
ALPHA = 0.05  # that an interval misses the truth at any of the looks
LOOKS = 4  # at which an experiment may end early
LAST = 2.18 + 1.04  # the normal quantiles of what the last look may spend on either side, and of a power of 85 %
LEAST = 0.1  # the change for which the time that is needed is told
ENUMERATED, DRAWN = 14, 20_000  # pairs up to which all subsets are taken, and the number of those drawn beyond
WASH_OUT = 0.5  # of a window, until the requests of the windows before it must have left
MOST_WASHED = 1 / 3  # of the windows may have a longer wash-out
MOST_FAILED = 0.01  # of the requests may fail under B beyond those under A
FEWEST = 3  # pairs from which the time that is needed can be estimated
MOST_CLIENTS = 8
BLOCKS = 12  # of simulated requests, which stand for pairs
SLACK = 0.01  # no prediction is surer
SAME, TAKE_B, KEEP_A, UNKNOWN = "no measurable difference", "take B", "keep A", "cannot be told at this load"


class Request(NamedTuple):
    """A request with its times in seconds; `first` and `end` are None until there is a token, and until it has ended."""

    id: str
    at: float
    first: float | None
    end: float | None
    tokens: int
    client: str = ""
    failed: bool = False


class Window(NamedTuple):
    """A span of time in which arm A or B served."""

    arm: str
    begin: float
    end: float


Pair = tuple[list[Request], list[Request]]  # those that count, of A and of B
Figure = Callable[[Sequence[Request], float], float]  # of the requests of a window as seen at a time


def latencies(requests: Sequence[Request], now: float) -> list[float]:
    """Return the seconds of each request until its end; one that has not ended counts with what it has waited."""
    return [(now if one.end is None else one.end) - one.at for one in requests]


def first_token(one: Request, now: float) -> float:
    """Return the seconds until the first token of a request, or until it ended without one."""
    return next(t for t in (one.first, one.end, now) if t is not None) - one.at


# Beside the goal. Tokens/s are those of a request, and goodput is a share: the load decides those of a server with slots to spare.
OTHERS: dict[str, Figure] = {
    "E2E p99": lambda requests, now: float(np.percentile(latencies(requests, now), 99)),
    "TTFT mean": lambda requests, now: float(np.mean([first_token(one, now) for one in requests])),
    "tokens/s": lambda requests, now: sum(one.tokens for one in requests) / sum(latencies(requests, now)),
}


def goodput(limits: Mapping[str, float] | None) -> dict[str, Figure]:
    """Return the figure of goodput if there are limits in ms: the share of requests that are within all so far."""

    def within(one: Request, now: float) -> bool:
        first, end = one.at + first_token(one, now), now if one.end is None else one.end
        return meets(Outcome(0, 0, one.at, one.at, end, one.tokens, "failed" * one.failed, first=first), limits or {})

    return {"goodput": lambda requests, now: float(np.mean([within(one, now) for one in requests]))} if limits else {}


def even_latency(requests: Sequence[Request], now: float) -> Figure:
    """Return the mean latency that a window would have if its answers were as long as those of all these requests.

    Answers differ far more in their lengths than policies differ. What a token adds is the same for all windows, whoever
    served them, so that it can make no effect.
    """
    tokens = np.array([one.tokens for one in requests], float)
    mean = float(tokens.mean()) if requests else 0.0
    off = tokens - mean
    slope = max(0.0, float(off @ latencies(requests, now) / (off @ off))) if off.any() else 0.0
    return lambda requests, now: float(
        np.mean(latencies(requests, now)) - slope * (np.mean([one.tokens for one in requests]) - mean)
    )


def pairs_of(requests: Sequence[Request], windows: Sequence[Window], now: float) -> tuple[list[Pair], Counter[str]]:
    """Return the pairs in which both windows count, and how many windows do not: those without requests are `empty`.

    Arrivals count as soon as all requests have left that arrived before the window. If that takes too long, it is `washed`.
    """
    pairs, void = [], Counter[str]()
    for two in zip(windows[::2], windows[1::2]):
        kept: dict[str, list[Request]] = {}
        for arm, begin, end in two:
            before = [now if one.end is None else one.end for one in requests if one.at < begin]
            since = max([begin, *before])
            counted = [one for one in requests if since <= one.at < end]
            if since - begin > WASH_OUT * (end - begin):
                void["washed"] += 1
            elif not counted:
                void["empty"] += 1
            else:
                kept[arm] = counted
        if len(kept) == 2:
            pairs.append((kept["A"], kept["B"]))
    return pairs, void


def looks_of(planned: int) -> list[int]:
    """Return after how many pairs an experiment looks whether it may end."""
    return [math.ceil(planned * look / LOOKS) for look in range(1, LOOKS + 1)]


def alpha_of(done: int, planned: int) -> float:
    """Return what the next look after so many pairs may spend of ALPHA, more the later it is; all looks spend ALPHA."""
    looks = looks_of(planned)
    at = min((each for each in looks if each >= done), default=planned)
    look = max(number for number, each in enumerate(looks, 1) if each == at)
    return ALPHA * (look**3 - (look - 1) ** 3) / LOOKS**3


def change(rows: Sequence[Sequence[float]], alpha: float) -> dict[str, float]:
    """Return the means of the columns A and B, and the change from A to B with its interval, as shares of A.

    Too few rows have an interval without an end.
    """
    both, count = np.array(rows, float).reshape(-1, 2), len(rows)
    if count <= ENUMERATED:
        subsets = np.arange(1, 1 << count)[:, None] >> np.arange(count) & 1
    else:
        subsets = np.random.default_rng(0).integers(0, 2, (DRAWN, count))  # always the same: a receipt can be repeated
        subsets = subsets[subsets.any(1)]
    low, high = 0.0, math.inf
    a, b = map(float, both.mean(0)) if count else (math.nan, math.nan)
    if outside := int(alpha / 2 * (len(subsets) + 1)):
        of_a, of_b = (subsets @ both).T
        ratios = np.sort(np.divide(of_b, of_a, out=np.full(len(of_a), math.inf), where=of_a > 0))
        low, high = float(ratios[outside - 1]), float(ratios[-outside])
    return {"a": a, "b": b, "change": b / a - 1 if a else (math.inf if b else 0.0), "low": low - 1, "high": high - 1}


def result_of(found: dict[str, Any], better: str, worse: str) -> str:
    """Return what the interval of a time says: B is better, worse, or neither."""
    return better if found["high"] < 0 else worse if found["low"] > 0 else SAME


def by_client(pairs: Sequence[Pair], goal: Figure, now: float, alpha: float) -> list[dict[str, Any]]:
    """Return who won and who lost by B, of the clients with most requests; their number widens each interval."""
    counts = Counter(one.client for pair in pairs for side in pair for one in side).most_common(MOST_CLIENTS)
    rows = []
    for name, count in counts:
        own = [[[one for one in side if one.client == name] for side in pair] for pair in pairs]
        found = change([[goal(side, now) for side in pair] for pair in own if all(pair)], alpha / len(counts))
        rows.append({"client": name, "requests": count, **found, "result": result_of(found, "won", "lost")})
    return rows


def pairs_needed(rows: Sequence[Sequence[float]]) -> int | None:
    """Return after how many pairs a change by LEAST would be found in 85 % of all cases; None of too few to tell."""
    if len(rows) < FEWEST:
        return None
    a, b = np.array(rows).T
    spread = float(np.std(b - a * b.sum() / a.sum(), ddof=1) / a.mean())
    return math.ceil((LAST * spread / LEAST) ** 2)


def predicted(
    a: Sequence[Request], b: Sequence[Request], off: float, limits: Mapping[str, float] | None = None
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the changes of figures of requests that were simulated with both policies; `off` is by how much those may err."""
    blocks = [block for block in np.array_split(np.arange(len(a)), BLOCKS) if len(block)]
    figures: dict[str, Figure] = {GOAL: lambda all, now: float(np.mean(latencies(all, now))), **goodput(limits)}
    off, before = max(SLACK, off), {}
    for name, of in figures.items():
        found = change([[of([side[i] for i in block], math.inf) for side in (a, b)] for block in blocks], ALPHA)
        low, high = max(-1.0, found["low"] - off), found["high"] + off
        before[name] = {"change": found["change"], "low": low, "high": high}
    return before


def need(found: dict[str, Any]) -> str:
    """Return how long it takes to find a change that matters, from a receipt of the first windows."""
    if found["needed_s"] is None:
        return f"too little traffic: {found['pairs']} of {found['done']} pairs of windows count. A longer --window may have more"
    least, planned = found["needed_s"] / 60, found["planned"] * found["pair_s"] / 60
    text = f"a change by {LEAST:.0%} takes about {math.ceil(least)} minutes to find"
    if least > planned:
        text += f". In {planned:.3g} minutes there is too little traffic: use --minutes {math.ceil(least)}"
    return text


def holds(before: dict[str, float], found: dict[str, Any]) -> bool:
    """Return whether a prediction's interval, widened by that of the measurement, holds what was measured."""
    toward, back = ("high", "low") if found["change"] >= before["change"] else ("low", "high")
    wide = math.hypot(before[toward] - before["change"], found[back] - found["change"])
    return bool(abs(found["change"] - before["change"]) <= wide)


def receipt(
    requests: Sequence[Request], windows: Sequence[Window], now: float, planned: int,
    before: Mapping[str, dict[str, float]] | None = None, limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what the windows show by `now`, of an experiment of so many planned pairs, with what was predicted of figures."""
    done = len(windows) // 2
    alpha, (pairs, void) = alpha_of(done, planned), pairs_of(requests, windows, now)
    counted = [[one for pair in pairs for one in pair[side]] for side in (0, 1)]
    goal = even_latency([*counted[0], *counted[1]], now)
    wanted = {GOAL: goal, **OTHERS, **goodput(limits)}
    rows = {name: [[of(side, now) for side in pair] for pair in pairs] for name, of in wanted.items()}
    figures: dict[str, dict[str, Any]] = {name: {**change(rows[name], alpha)} for name in rows}
    for name, expected in (before or {}).items():
        figures[name] |= {"predicted": expected, "held": holds(expected, figures[name])}
    verdict = result_of(figures[GOAL], TAKE_B, KEEP_A)
    failed = [sum(one.failed for one in side) / len(side) if side else 0.0 for side in counted]
    if verdict == TAKE_B and failed[1] > failed[0] + MOST_FAILED:
        verdict = KEEP_A  # who is refused waits for nothing
    if not pairs or (done >= FEWEST and void["washed"] > MOST_WASHED * len(windows)):
        verdict = UNKNOWN
    needed = pairs_needed(rows[GOAL])
    pair_s = (windows[-1].end - windows[0].begin) / done if done else 0.0
    return {
        "verdict": verdict, "pairs": len(pairs), "done": done, "planned": planned, "void": dict(void), "level": 1 - alpha,
        "requests": len(counted[0]) + len(counted[1]), "failed": failed, "figures": figures,
        "unfinished": sum(one.end is None for side in counted for one in side),
        "clients": by_client(pairs, goal, now, alpha),
        "pair_s": pair_s,
        "needed_s": needed * pair_s * done / len(pairs) if needed else None,  # with as many that do not count as so far
    }  # fmt: skip


def shown(found: Mapping[str, float]) -> str:
    """Return a change with its interval, in percent."""
    change, low, high = (f"{100 * found[name]:+.{abs(found[name]) < 1:d}f}" for name in ("change", "low", "high"))
    return f"{change} ({low} to {high})" if math.isfinite(found["high"]) else f"{change} (too few)"


def lines_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return what a receipt shows as text: a title, the heads of the columns, a row for each figure and client, and the verdict."""
    lines = [
        [f"{found['requests']:,} requests in {found['pairs']} pairs of windows; times in s, clients: {GOAL}"],
        ["what", "A", "B", "change % (95 %)", "predicted, or with B"],
    ]
    named = [*found["figures"].items(), *((one["client"] or "(no name)", one) for one in found["clients"])]
    for name, one in named if found["pairs"] else ():
        told = "held" if one.get("held") else "missed"
        last = f"{shown(one['predicted'])} {told}" if "held" in one else one.get("result", "")
        lines.append([name, f"{one['a']:.3g}", f"{one['b']:.3g}", shown(one), last])
    ended = f"ended early: {found['ended']}. " if found["ended"] else ""
    return [*lines, [f"{ended}{found['verdict']} (A {found['arms']['A']}, B {found['arms']['B']})"]]

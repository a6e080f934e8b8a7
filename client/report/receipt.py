"""What two policies in alternating windows of live traffic show: the receipt of an experiment.

Requests and windows go in, a plain dictionary comes out. It must not know clocks, files or servers: an experiment on the
simulator's clock is judged by the same code as one on a server.

Each pair of windows has both policies, in an order that was drawn. If they do not differ, drawing the other order would have
exchanged the two sides of the pair and nothing else, whatever the load did: neither a drift nor a burst can look like an
effect. Figures are over all requests of a side, and intervals are made of the ratios of the same figure over subsets of the
pairs: the true ratio lies between any two neighbors of them with the same probability, exactly so if the sides of a pair have as
many requests (Hartigan, "Using subsample values as typical values", 1969).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from .measure import Outcome, meets

GOAL, P99, FAILED = "E2E mean", "E2E p99", "failed"
ALPHA = 0.05  # that an interval misses the truth at any of the looks
LOOKS = 4  # at which an experiment may end early
LAST = 2.18 + 1.04  # the normal quantiles of what the last look may spend on either side, and of a power of 85 %
LEAST = 0.1  # the change for which the time that is needed is told
ENUMERATED, DRAWN = 14, 20_000  # pairs up to which all subsets are taken, and the number of those drawn beyond
WASH_OUT = 0.5  # of a window, until the requests of the windows before it must have left
MOST_WASHED = 1 / 3  # of the windows may have a longer wash-out
MOST_FAILED = 0.01  # of the requests may fail under B beyond those under A
FEWEST = 3  # pairs from which the time that is needed can be estimated
VOID = {"washed": "earlier requests were too slow to leave", "empty": "no request arrived in time"}
TELLING = 7  # pairs, the fewest whose subsets are enough for an interval at the last look
EDGES = 1 - np.append(np.geomspace(1, 0.0005, 120), 0)  # shares of a side's requests, below what a p99 may be
MOST_CLIENTS = 8
BLOCKS = 12  # of simulated requests, which stand for pairs
SLACK = 0.01  # no prediction is surer
SAME, TAKE_B, KEEP_A, UNKNOWN = "no measurable difference", "take B", "keep A", "cannot be told at this load"
TOO_FEW = "too few pairs to tell"


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
Figure = Callable[[Request, float], tuple[float, float]]  # what a request, seen at a time, adds to a sum and a divisor
Values = Callable[[np.ndarray], np.ndarray]  # of subsets of the pairs, rows of ones and zeros, for A and B


def latency(one: Request, now: float) -> float:
    """Return the seconds of a request until its end; one that has not ended counts with what it has waited."""
    return (now if one.end is None else one.end) - one.at


def first_token(one: Request, now: float) -> float:
    """Return the seconds until the first token of a request, or until it ended without one."""
    return next(t for t in (one.first, one.end, now) if t is not None) - one.at


# Beside the goal. Tokens/s are those of a request, and goodput is a share: the load decides those of a server with slots to spare.
OTHERS: dict[str, Figure] = {
    "TTFT mean": lambda one, now: (first_token(one, now), 1),
    "tokens/s": lambda one, now: (one.tokens, latency(one, now) + 1e-9),  # a refusal takes no time
    FAILED: lambda one, now: (one.failed, 1),
}


def goodput(limits: Mapping[str, float] | None) -> dict[str, Figure]:
    """Return the figure of goodput if there are limits in ms: the share of requests that are within all so far."""

    def within(one: Request, now: float) -> bool:
        first, end = one.at + first_token(one, now), now if one.end is None else one.end
        return meets(Outcome(0, 0, one.at, one.at, end, one.tokens, "failed" * one.failed, first=first), limits or {})

    return {"goodput": lambda one, now: (within(one, now), 1)} if limits else {}


def even_latency(requests: Sequence[Request], now: float) -> Figure:
    """Return the mean latency that a side would have if its answers were as long as those of all these requests.

    Answers differ far more in their lengths than policies differ. What a token adds is the same for all windows, whoever
    served them, so that it can make no effect.
    """
    tokens = np.array([one.tokens for one in requests], float)
    mean = float(tokens.mean()) if requests else 0.0
    off = tokens - mean
    slope = max(0.0, float(off @ [latency(one, now) for one in requests] / (off @ off))) if off.any() else 0.0
    return lambda one, now: (latency(one, now) - slope * (one.tokens - mean), 1)


def pairs_of(requests: Sequence[Request], windows: Sequence[Window], now: float) -> tuple[list[Pair], Counter[str]]:
    """Return the pairs in which both windows count, and how many windows do not: those without requests are `empty`.

    Arrivals count as soon as all requests have left that arrived before the window. If that takes too long, it is `washed`.
    """
    pairs, void = [], Counter[str]()
    requests = sorted(requests, key=lambda one: one.at)
    at = [one.at for one in requests]
    ends = (now if one.end is None else one.end for one in requests)
    left = [-math.inf, *accumulate(ends, max)]  # when the first requests had left, for each number of them
    for two in zip(windows[::2], windows[1::2]):
        kept: dict[str, list[Request]] = {}
        for arm, begin, end in two:
            since = max(begin, left[bisect_left(at, begin)])
            counted = requests[bisect_left(at, since) : bisect_left(at, end)]
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
    """Return what the look after so many pairs may spend of ALPHA, more the later it is; all looks spend ALPHA."""
    look = max(1, done * LOOKS // planned)
    return ALPHA * (look**3 - (look - 1) ** 3) / LOOKS**3


def pooled(pairs: Sequence[Pair], figure: Figure, now: float) -> Values:
    """Return a figure over all requests of the pairs that are chosen: the sum of what they add, by that of their divisors."""
    rows = [[np.sum([figure(one, now) for one in side], axis=0) for side in pair] for pair in pairs]
    sums = np.array(rows, float).reshape(-1, 2, 2)
    return lambda chosen: np.divide(chosen @ sums[:, :, 0], chosen @ sums[:, :, 1])


def pooled_p99(pairs: Sequence[Pair], now: float) -> Values:
    """Return the 99th percentile of latency over all requests of the pairs that are chosen, to one of the EDGES."""
    times = [[np.array([latency(one, now) for one in side]) for side in pair] for pair in pairs]
    edges = [np.quantile(np.concatenate(side), EDGES, method="higher") for side in zip(*times)]
    beyond = [
        [(t[:, None] > e).sum(0) - 0.01 * len(t) for t, e in zip(pair, edges)] for pair in times
    ]  # less what may be
    return lambda chosen: np.column_stack(
        [e[place] for e, place in zip(edges, (np.tensordot(chosen, beyond, 1) < 1e-6).argmax(-1).T)]
    )


@lru_cache(maxsize=1)
def subsets_of(count: int) -> np.ndarray:
    """Return subsets of so many pairs as rows of ones and zeros: all but the empty one, or many that are always the same."""
    if count <= ENUMERATED:
        return np.arange(1, 1 << count)[:, None] >> np.arange(count) & 1
    subsets = np.random.default_rng(0).integers(0, 2, (DRAWN, count), np.int8)  # a receipt can be repeated
    return subsets[subsets.any(1)]


def change(values: Values, count: int, alpha: float) -> dict[str, Any]:
    """Return a figure of A and of B over so many pairs, and its change from A to B with an interval, as shares of A.

    The interval of too few pairs is not `enough` and has no end.
    """
    subsets = subsets_of(count)
    low, high, outside = 0.0, math.inf, int(alpha / 2 * (len(subsets) + 1))
    a, b = map(float, values(np.ones((1, count)))[0]) if count else (math.nan, math.nan)
    if outside:
        of_a, of_b = values(subsets).T
        ratios = np.sort(np.divide(of_b, of_a, out=np.where(of_b > 0, math.inf, 1.0), where=of_a > 0))
        low, high = float(ratios[outside - 1]), float(ratios[-outside])
    ratio = b / a if a else math.inf if b else 1.0
    return {"a": a, "b": b, "change": ratio - 1, "low": low - 1, "high": high - 1, "enough": outside > 0}


def result_of(times: dict[str, Any], failed: dict[str, Any], better: str, worse: str) -> str:
    """Return whether B is better, worse, or neither, by the interval of a time and that of the share of failed requests.

    A failed request may have waited for nothing. So the side that fails more does not win by its times, and loses by that share.
    """
    if not times["enough"]:
        return TOO_FEW
    by_times, by_failed = (better if of["high"] < 0 else worse if of["low"] > 0 else SAME for of in (times, failed))
    more = failed["b"] - failed["a"]
    return by_failed if abs(more) > MOST_FAILED and by_times != (worse if more > 0 else better) else by_times


def by_client(pairs: Sequence[Pair], goal: Figure, now: float, alpha: float) -> list[dict[str, Any]]:
    """Return who won and who lost by B, of the clients with most requests; their number widens each interval."""
    clients = Counter(one.client for pair in pairs for side in pair for one in side).most_common(MOST_CLIENTS)
    rows = []
    for name, requests in clients:
        both = [([one for one in a if one.client == name], [one for one in b if one.client == name]) for a, b in pairs]
        own = [pair for pair in both if all(pair)]
        values = [pooled(own, figure, now) for figure in (goal, OTHERS[FAILED])]
        found, failed = (change(of, len(own), alpha / len(clients)) for of in values)
        rows.append({"client": name, "requests": requests, **found, "result": result_of(found, failed, "won", "lost")})
    return rows


def pairs_needed(values: Values, count: int) -> int | None:
    """Return after how many pairs a change by LEAST would be found in 85 % of all cases; None of too few to tell."""
    if count < FEWEST:
        return None
    a, b = values(np.eye(count)).T
    spread = float(np.std(b - a * b.sum() / a.sum(), ddof=1) / a.mean())
    return max(TELLING, math.ceil((LAST * spread / LEAST) ** 2))


def predicted(
    a: Sequence[Request], b: Sequence[Request], off: float, limits: Mapping[str, float] | None = None
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the changes of figures of requests that were simulated with both policies; `off` is by how much those may err."""
    ends = [len(a) * i // BLOCKS for i in range(BLOCKS + 1)]
    blocks = [([*a[i:j]], [*b[i:j]]) for i, j in pairwise(ends)]
    figures: dict[str, Figure] = {GOAL: lambda one, now: (latency(one, now), 1), **goodput(limits)}
    off, before = max(SLACK, off), {}
    for name, figure in figures.items():
        found = change(pooled(blocks, figure, math.inf), BLOCKS, ALPHA)
        low, high = max(-1.0, found["low"] - off), found["high"] + off
        before[name] = {"change": found["change"], "low": low, "high": high}
    return before


def need(found: dict[str, Any]) -> str:
    """Return how long it takes to find a change that matters, from a receipt of the first windows."""
    if found["needed_s"] is None:
        return (
            f"too little traffic: {found['pairs']} of {found['done']} pairs count{found['why']}. Use a longer --window"
        )
    least, planned = found["needed_s"] / 60, found["planned"] * found["pair_s"] / 60
    more = (
        f". In {planned:.3g} min there is too little traffic: use --minutes {math.ceil(least)}"
        if least > planned
        else ""
    )
    return f"a change by {LEAST:.0%} takes about {math.ceil(least)} min to find{more}"


def holds(before: dict[str, float], found: dict[str, Any]) -> bool | None:
    """Return whether a prediction's interval, widened by that of the measurement, holds what was measured; None if unknown."""
    if not math.isfinite(found["high"]):
        return None
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
    others = {name: pooled(pairs, figure, now) for name, figure in {**OTHERS, **goodput(limits)}.items()}
    values = {GOAL: pooled(pairs, goal, now), P99: pooled_p99(pairs, now), **others}
    figures: dict[str, dict[str, Any]] = {name: change(values[name], len(pairs), alpha) for name in values}
    for name, expected in (before or {}).items():
        figures[name] |= {"predicted": expected, "held": holds(expected, figures[name])}
    verdict = result_of(figures[GOAL], figures[FAILED], TAKE_B, KEEP_A)
    if done >= FEWEST and (not pairs or void["washed"] > MOST_WASHED * len(windows)):
        verdict = UNKNOWN
    needed = pairs_needed(values[GOAL], len(pairs))
    why = "".join(f"; in {count} of {2 * done} windows {VOID[kind]}" for kind, count in void.items())
    pair_s = (windows[-1].end - windows[0].begin) / done if done else 0.0
    return {
        "verdict": verdict, "pairs": len(pairs), "done": done, "planned": planned, "void": dict(void), "why": why, "level": 1 - alpha,
        "requests": len(counted[0]) + len(counted[1]), "figures": figures,
        "unfinished": sum(one.end is None for side in counted for one in side),
        "clients": by_client(pairs, goal, now, alpha),
        "pair_s": pair_s,
        "needed_s": needed * pair_s * done / len(pairs) if needed else None,  # with as many that do not count as so far
    }  # fmt: skip


def shown(found: Mapping[str, float]) -> str:
    """Return a change with its interval, in percent."""
    change, low, high = (f"{100 * found[name]:+.{abs(found[name]) < 0.1:d}f}" for name in ("change", "low", "high"))
    return f"{change} ({low} to {high})" if found.get("enough", True) else f"{change} (too few)".replace("+nan", "-")


def lines_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return what a receipt shows as text: a title, the heads of the columns, a row for each figure and client, and the verdict."""
    lines = [
        [f"{found['requests']:,} requests, pairs: {found['pairs']}. In s; {GOAL} and clients at equal answer lengths"],
        ["what", "A", "B", "change % (95 %)", "predicted, or with B"],
    ]
    named = [*found["figures"].items(), *((one["client"] or "(no name)", one) for one in found["clients"])]
    for name, one in named if found["pairs"] else ():
        held = {True: " held", False: " missed", None: ""}[one.get("held")]
        last = shown(one["predicted"]) + held if "predicted" in one else one.get("result", "")
        sides = [f"{one[side]:.3g}".replace("nan", "-") for side in "ab"]
        lines.append([name, *sides, shown(one), last])
    ended = f"ended early: {found['ended']}. " if found["ended"] else ""
    return [*lines, [f"{ended}{found['verdict']} (A {found['arms']['A']}, B {found['arms']['B']}){found['why']}"]]

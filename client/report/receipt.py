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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

GOAL = "E2E mean"
ALPHA = 0.05  # that an interval misses the truth at any of the looks
LOOKS = 4  # at which an experiment may end early
ENUMERATED, DRAWN = 12, 20_000  # pairs up to which all subsets are taken, and the number of those drawn beyond
WASH_OUT = 0.5  # of a window, until the requests of the windows before it must have left
MOST_WASHED = 1 / 3  # of the windows may have a wash-out that is longer
FEWEST = 3  # pairs from which the time that is needed can be estimated
LEAST = 0.1  # the change that an experiment should find, in POWER of all cases
POWER = 0.85
MOST_CLIENTS = 8
SAME, TAKE_B, KEEP_A, UNKNOWN = "no measurable difference", "take B", "keep A", "cannot be told at this load"
Figure = Callable[[Sequence["Request"], float, float], float]


class Request(NamedTuple):
    """A request with its times in seconds; `first` and `end` are None until there is a token, and until it has ended."""

    id: str
    at: float
    first: float | None
    end: float | None
    tokens: int
    client: str = ""


class Window(NamedTuple):
    """A span of time in which arm A or B served."""

    arm: str
    begin: float
    end: float


class Pair(NamedTuple):
    """The requests that count of a pair of windows, and the seconds in which they arrived, of A and of B."""

    requests: tuple[list[Request], list[Request]]
    seconds: tuple[float, float]


def latencies(requests: Sequence[Request], now: float) -> list[float]:
    """Return the seconds of each request until its end; one that has not ended counts with what it has waited."""
    return [(now if one.end is None else one.end) - one.at for one in requests]


def first_tokens(requests: Sequence[Request], now: float) -> list[float]:
    """Return the seconds of each request until its first token, or until it ended without one."""
    return [next(t for t in (one.first, one.end, now) if t is not None) - one.at for one in requests]


def even_latency(pairs: Sequence[Pair], now: float) -> Figure:
    """Return the mean latency that requests would have with answers of the same mean length in each window.

    Answers differ far more in their lengths than policies differ. What a token adds is the same for all windows, whoever
    served them, so that it can make no effect.
    """
    counted = [one for pair in pairs for side in pair.requests for one in side]
    tokens = np.array([one.tokens for one in counted], float)
    mean = float(tokens.mean()) if counted else 0.0
    off = tokens - mean
    slope = max(0.0, float(off @ latencies(counted, now) / (off @ off))) if off.any() else 0.0

    def figure(requests: Sequence[Request], now: float, seconds: float) -> float:
        return float(np.mean(latencies(requests, now)) - slope * (np.mean([one.tokens for one in requests]) - mean))

    return figure


# What else is compared, of the requests that arrived in so many seconds, as seen at a time.
OTHERS: dict[str, Figure] = {
    "E2E p99": lambda requests, now, seconds: float(np.percentile(latencies(requests, now), 99)),
    "TTFT mean": lambda requests, now, seconds: float(np.mean(first_tokens(requests, now))),
    "tokens/s": lambda requests, now, seconds: sum(one.tokens for one in requests) / seconds,
}


def washed(requests: Sequence[Request], window: Window, now: float) -> float:
    """Return when all requests had left that arrived before a window: from then on arrivals count."""
    ends = [now if one.end is None else one.end for one in requests if one.at < window.begin]
    return max([window.begin, *ends])


def pairs_of(requests: Sequence[Request], windows: Sequence[Window], now: float) -> tuple[list[Pair], Counter[str]]:
    """Return the pairs in which both windows count, and how many windows do not, by reason: `washed` or `empty`."""
    pairs, void = [], Counter[str]()
    for two in zip(windows[::2], windows[1::2]):
        kept: dict[str, tuple[list[Request], float]] = {}
        for window in two:
            begin = washed(requests, window, now)
            counted = [one for one in requests if begin <= one.at < window.end]
            if begin - window.begin > WASH_OUT * (window.end - window.begin):
                void["washed"] += 1
            elif not counted:
                void["empty"] += 1
            else:
                kept[window.arm] = counted, window.end - begin
        if len(kept) == 2:
            (a, a_seconds), (b, b_seconds) = kept["A"], kept["B"]
            pairs.append(Pair((a, b), (a_seconds, b_seconds)))
    return pairs, void


def alpha_of(done: int, planned: int) -> float:
    """Return what the look after so many pairs may spend of ALPHA, more the later it is; the sum of all looks is ALPHA."""
    look = min(LOOKS, max(1, math.ceil(LOOKS * done / planned)))
    return ALPHA * (look**3 - (look - 1) ** 3) / LOOKS**3


def is_look(done: int, planned: int) -> bool:
    """Return whether an experiment may end after so many pairs."""
    return done in {math.ceil(planned * look / LOOKS) for look in range(1, LOOKS + 1)}


def interval(both: np.ndarray, alpha: float) -> tuple[float, float]:
    """Return between which values the ratio of B to A lies, from a row (A, B) for each pair; (0, inf) of too few pairs."""
    count = len(both)
    if count <= ENUMERATED:
        subsets = np.arange(1, 1 << count)[:, None] >> np.arange(count) & 1
    else:
        subsets = np.random.default_rng(0).integers(
            0, 2, (DRAWN, count)
        )  # the same in each run: a receipt is repeatable
        subsets = subsets[subsets.any(1)]
    outside = int(alpha / 2 * (len(subsets) + 1))
    if not outside:
        return 0.0, math.inf
    a, b = (subsets @ both).T
    with np.errstate(divide="ignore", invalid="ignore"):  # no token in A
        ratios = np.sort(np.where(a > 0, b / a, math.inf))
    return float(ratios[outside - 1]), float(ratios[-outside])


def measured(pairs: Sequence[Pair], figure: Figure, now: float, alpha: float) -> dict[str, Any]:
    """Return a figure of A and of B, and the change from A to B with its interval, as shares of A."""
    rows = [[figure(r, now, s) for r, s in zip(*pair)] for pair in pairs]
    both = np.array(rows, float).reshape(-1, 2)
    a, b = both.mean(0) if len(both) else (math.nan, math.nan)
    low, high = interval(both, alpha)
    return {
        "a": float(a),
        "b": float(b),
        "change": float(b / a - 1 if a else math.nan),
        "low": low - 1,
        "high": high - 1,
    }


def result_of(found: dict[str, Any], better: str, worse: str) -> str:
    """Return in one word what an interval of a time says: B is better, worse, or neither."""
    return better if found["high"] < 0 else worse if found["low"] > 0 else SAME


def by_client(pairs: Sequence[Pair], goal: Figure, now: float, alpha: float) -> list[dict[str, Any]]:
    """Return who won and who lost by B, of the clients with most requests; their number corrects each interval."""
    counts = Counter(one.client for pair in pairs for side in pair.requests for one in side)
    clients = [name for name, _ in counts.most_common(MOST_CLIENTS)]
    rows = []
    for name in clients:
        own = [
            Pair((sides[0], sides[1]), pair.seconds)
            for pair in pairs
            if all(sides := [[one for one in side if one.client == name] for side in pair.requests])
        ]
        found = measured(own, goal, now, alpha / len(clients))
        rows.append({"client": name, "requests": counts[name], **found, "result": result_of(found, "won", "lost")})
    return rows


def pairs_needed(pairs: Sequence[Pair], goal: Figure, now: float) -> int | None:
    """Return the pairs after which a change by LEAST would be found in POWER of all cases; None of too few to tell."""
    if len(pairs) < FEWEST:
        return None
    rows = [[goal(r, now, s) for r, s in zip(*pair)] for pair in pairs]
    a, b = np.array(rows).T
    spread = float(np.std(b - a * b.sum() / a.sum(), ddof=1) / a.mean())
    both = 2.18 + 1.04  # the normal quantiles of the last look's half alpha, and of POWER
    return math.ceil((both * spread / LEAST) ** 2)


def holds(predicted: dict[str, float], found: dict[str, Any]) -> bool:
    """Return whether a prediction's interval, widened by that of the measurement, holds what was measured."""
    toward, back = ("high", "low") if found["change"] >= predicted["change"] else ("low", "high")
    wide = math.hypot(predicted[toward] - predicted["change"], found[back] - found["change"])
    return bool(abs(found["change"] - predicted["change"]) <= wide)


def receipt(
    requests: Sequence[Request], windows: Sequence[Window], now: float, planned: int,
    predicted: dict[str, dict[str, float]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what the windows show by `now`, of an experiment of so many planned pairs; changes are shares of A."""
    done = len(windows) // 2
    alpha, (pairs, void) = alpha_of(done, planned), pairs_of(requests, windows, now)
    goal = even_latency(pairs, now)
    figures = {name: measured(pairs, figure, now, alpha) for name, figure in {GOAL: goal, **OTHERS}.items()}
    for name, before in (predicted or {}).items():
        figures[name] |= {"predicted": before, "held": holds(before, figures[name])}
    verdict = result_of(figures[GOAL], TAKE_B, KEEP_A)
    if done >= FEWEST and void["washed"] > MOST_WASHED * 2 * done:
        verdict = UNKNOWN
    needed = pairs_needed(pairs, goal, now)
    share = len(pairs) / done if done else 0.0  # of the pairs that count
    seconds = [two[1].end - two[0].begin for two in zip(windows[::2], windows[1::2])]
    return {
        "verdict": verdict, "pairs": len(pairs), "done": done, "planned": planned, "void": dict(void), "level": 1 - alpha,
        "requests": sum(len(side) for pair in pairs for side in pair.requests),
        "unfinished": sum(one.end is None for pair in pairs for side in pair.requests for one in side),
        "figures": figures, "clients": by_client(pairs, goal, now, alpha),
        "needed_s": needed / share * float(np.mean(seconds)) if needed else None,
    }  # fmt: skip

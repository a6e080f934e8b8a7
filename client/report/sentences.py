"""Sentences below pictures of a comparison, computed from their data, where no table says the same. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import figures
from .store import Results
from .summary import average
from .tables import shown, swept

CLEAR, LOOSE = 0.7, 0.3  # correlations
Pairs = Sequence[tuple[float, float]]


def seconds(value: float) -> str:
    """Return a time with two or three digits."""
    if value < 0.1:
        return f"{1000 * value:.{0 if value >= 0.01 else 1}f} ms"
    return f"{value:.{2 if value < 10 else 0}f} s"


def joined(parts: Iterable[str]) -> str:
    """Return a list in words: a, b and c."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def each(values: Mapping[str, str]) -> str:
    """Return the value of each policy: 1 s (dynamic), 2 s (static) and 9 s (nobatch)."""
    return joined(f"{text} ({policy})" for policy, text in values.items())


def growing(thing: str, cause: str, pairs: Mapping[str, Pairs]) -> str:
    """Report under which policies a time grows with its cause, counted in tokens, and under which it does not."""
    kinds: dict[str, list[str]] = {}
    for policy, points in pairs.items():
        fitted = figures.fit(*zip(*points)) if len(points) > 1 else None
        if fitted is None:
            continue
        ms, r = 1000 * fitted[0], fitted[2]
        if r >= CLEAR:
            pace = f"{shown(ms, 2 if ms < 1 else 1)} ms per token"
            kinds.setdefault("grows", []).append(f"{policy} ({pace}, r = {r:.2f})")
        else:
            kind = "loosely" if r >= LOOSE else "not" if r > -LOOSE else "falls"
            kinds.setdefault(kind, []).append(f"{policy} (r = {round(r, 2) + 0.0:.2f})")
    words = {"grows": ("grows with {}", "clearly"), "loosely": ("grows only loosely with {}", "only loosely"),
             "not": ("hardly depends on {}", "hardly"), "falls": ("falls with {}", "falls")}  # fmt: skip
    parts = [
        f"{words[kind][min(i, 1)].format(cause)} under {joined(kinds[kind])}"
        for i, kind in enumerate(kind for kind in words if kind in kinds)
    ]
    return f"{thing} {joined(parts)}." if parts else ""


def tails(results: Results, load: str) -> str:
    """Report how much longer the slowest requests took."""
    shares = {}
    for policy in results.policies:
        p50, p99 = (average(results.of(policy, load), f"p{q}_e2el_ms") for q in (50, 99))
        if p50 and p99:
            shares[policy] = f"{p99 / p50:.1f}"
    return f"At p99 a request took {each(shares)} times the median." if shares else ""


def in_system(levels: Mapping[str, tuple[int, float]]) -> str:
    """Report how many requests were in the system at most, and how long the last one took; by policy."""
    most = {policy: f"{peak:,}" for policy, (peak, _) in levels.items()}
    ends = {policy: seconds(end) for policy, (_, end) in levels.items()}
    peak = next(iter(most.values())) if len(set(most.values())) == 1 else each(most)
    return f"At most {peak} requests were sent and not yet answered; the last answer came after {each(ends)}."


def batch_sizes(batches: Mapping[str, Mapping[str, int]]) -> str:
    """Report which batch size was the most frequent."""
    tops = {}
    for policy, counts in batches.items():
        size = max(counts, key=lambda size: counts[size])
        tops[policy] = f"{size} under {policy} ({counts[size] / sum(counts.values()):.0%} of its steps)"
    return f"The most frequent batch size is {joined(tops.values())}."


def over_time(name: str, values: Mapping[str, Sequence[float]]) -> str:
    """Report how large the batch was on average, or how long the queue at most; by policy."""
    if name == "queue-over-time":
        most = {p: f"{max(series):,.0f}" for p, series in values.items()}
        return f"At most {each(most)} requests waited at the same time."
    means = {p: f"{float(np.mean(series)):.1f}" for p, series in values.items()}
    return f"A step had {each(means)} requests on average, held ones included."


def slots(steps: Sequence[Mapping[str, Any]], recorded: int) -> str:
    """Report how many slots were in use in these of the recorded steps, and how many were held for finished requests."""
    phases = [member["phase"] for step in steps for member in step["members"]]
    used = sum(phase != "idle" for phase in phases)
    held = phases.count("held")
    count = max((round(sum((step.get("slot_steps") or {}).values())) for step in steps), default=0)
    when = "On average" if len(steps) == recorded else f"In the {len(steps):,} busiest of {recorded:,} steps on average"
    text = f"{when} {used / len(steps):.1f}{f' of {count}' if count else ''} slots are in use"
    if not held:
        return f"{text}, and no request keeps its slot after its last token."
    return f"{text}, {held / used:.0%} of them (pale) held for requests that had finished."


def predicted(errors: Mapping[str, float], bars: Sequence[Sequence[float]] = ()) -> str:
    """Report the error of the simulated mean latency, and how many intervals of mean and p99 hold the measurement."""
    text = f"The simulated mean latency is off by {each({p: f'{error:+.1%}' for p, error in errors.items()})}."
    held = sum(low <= measured <= high for measured, _, low, high in bars)
    return f"{text} {held} of {len(bars)} 90 % intervals of mean and p99 hold the measurement." if bars else text


def blamed(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Report the client that cost another one most with each policy, and its residual."""
    parts = []
    for policy, blame in known.items():
        clients, wait, run = blame["clients"], blame["wait_ms"], blame["run_ms"]
        pairs = [(k, j) for k in range(len(clients)) for j in range(len(clients)) if k != j or len(clients) == 1]
        k, j = max(pairs, key=lambda pair: wait["by"][pair[0]][pair[1]] + run["by"][pair[0]][pair[1]])
        parts.append(
            f"{policy}: requests of {clients[k]} wait {wait['by'][k][j]:,.0f} ms and run {run['by'][k][j]:,.0f} ms longer "
            f"because of {clients[j]}"
        )
    return f"{'; '.join(parts)}."


def at_the_end(
    points: Mapping[str, Sequence[tuple[float, ...]]], over: str, axis: str, text: Callable[[float], str], scale: float
) -> str:
    """Report each policy's figures at the highest swept value that all of them have."""
    common = set.intersection(*({row[0] for row in rows} for rows in points.values()))
    if not common:
        return ""
    last = max(common)
    rows = {policy: next(row for row in rows if row[0] == last) for policy, rows in points.items()}
    parts = {policy: " and ".join(text(scale * value) for value in row[1:]) for policy, row in rows.items()}
    kind = " at p50 and p99" if any(len(row) > 2 for row in rows.values()) else ""
    listed = "; ".join(f"{policy} {values}" for policy, values in parts.items())
    return f"At {swept(over, last)} {axis.partition(' (')[0]}{kind}: {listed}."

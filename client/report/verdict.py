"""Compare two runs of the same arrivals, measure by measure: is the difference more than chance? Pure.

Requests are paired by their index, since both runs sent the same ones, and resampled in blocks of neighbors
(`figures.blocks`) for 95 % intervals. One run each says nothing about the spread from run to run, so figures of a
whole run (throughput) have no interval here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from terminal.console import table_of

from . import figures
from .tables import PLAIN, shown

SAME = "not distinguishable"
NAMES = {
    "e2el": "E2E", "ttft": "TTFT", "tpot": "TPOT", "normalized_latency": "per token", "itl": "ITL", "program": "program time",
    "output_throughput": "output tokens/s", "request_throughput": "requests/s", "request_goodput": "goodput/s",
    "completed": "completed", "failed": "failed",
}  # fmt: skip
WHOLE = ("output_throughput", "request_throughput", "request_goodput", "completed", "failed")
Column = list[Any]


class DifferentArrivals(Exception):
    """The runs did not send the same requests at the same times."""


@dataclass(frozen=True, slots=True)
class Line:
    """One measure of two runs: both values, the interval of B - A, and the verdict."""

    measure: str
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None
    verdict: str = "no interval from one run each"

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a


def columns(run: Mapping[str, Any]) -> dict[str, Column]:
    """Return each request's value in ms by measure, None if unknown; for ITL the list of its gaps, and each program's time."""
    e2els = run.get("e2els") or []
    ttfts = run.get("ttfts") or [None] * len(e2els)
    tokens = run.get("output_lens") or [0] * len(e2els)
    gaps = run.get("itls") or [None] * len(e2els)
    rows = list(zip(e2els, ttfts, tokens))
    return {
        "e2el": [None if e is None else 1000 * e for e in e2els],
        "ttft": [None if t is None or e is None else 1000 * t for e, t, _ in rows],
        "tpot": [None if e is None or t is None or n < 2 else 1000 * (e - t) / (n - 1) for e, t, n in rows],
        "normalized_latency": [None if e is None or not n else 1000 * e / n for e, _, n in rows],
        "program": [None if p["took_s"] is None else 1000 * p["took_s"] for p in run.get("program_times") or ()],
        "itl": [None if e is None or not g else [1000 * gap for gap in g] for e, g in zip(e2els, gaps)],
    }


def compare(a: Mapping[str, Any], b: Mapping[str, Any], different: bool = False) -> list[Line]:
    """Compare two results; raise DifferentArrivals unless `different` allows them to differ."""
    paired = a.get("trace_sha256") == b.get("trace_sha256")
    if not (paired or different):
        raise DifferentArrivals
    one, two = columns(a), columns(b)
    lines = []
    for name in one:
        x, y = one[name], two[name]
        if paired and len(x) == len(y):
            both = [(p, q) for p, q in zip(x, y) if p is not None and q is not None]
            x, y = [p for p, _ in both], [q for _, q in both]
            lines += _lines(name, x, y, True)
        else:
            lines += _lines(name, _known(x), _known(y), False)
    for name in WHOLE:
        first, second = a.get(name), b.get(name)
        if first is not None or second is not None:
            lines.append(Line(name, first, second))
    return lines


def _known(values: Column) -> Column:
    return [value for value in values if value is not None]


def _lines(name: str, x: Column, y: Column, paired: bool) -> list[Line]:
    if not x or not y:
        return []

    def statistics(values: Column, at: np.ndarray) -> np.ndarray:  # of each row of positions
        if not isinstance(values[0], list):
            return figures.mean_p50_p99(np.array(values)[at])
        return np.array([figures.mean_p50_p99(np.concatenate([values[i] for i in row])) for row in at])

    def changes(at: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
        change: np.ndarray = statistics(y, at if other is None else other) - statistics(x, at)
        return change

    names = [f"{key}_{name}_ms" for key in ("mean", "p50", "p99")]
    both = [statistics(values, np.arange(len(values))[None])[0].tolist() for values in (x, y)]
    if min(len(x), len(y)) < figures.MIN_REQUESTS:
        verdict = f"fewer than {figures.MIN_REQUESTS} requests"
        return [Line(name, a, b, verdict=verdict) for name, a, b in zip(names, *both)]
    spans = figures.bootstrap(changes, *([len(x)] if paired else [len(x), len(y)]))
    return [Line(name, a, b, low, high, _verdict(a, low, high)) for name, a, b, (low, high) in zip(names, *both, spans)]


def _verdict(a: float, low: float, high: float) -> str:
    """Return which run is faster, if the interval of the difference does not include 0."""
    if low <= 0 <= high:
        return SAME
    share = f" by {min(abs(low), abs(high)) / a:.0%} or more" if a else ""
    return ("B is slower" if low > 0 else "B is faster") + share


def as_dict(line: Line) -> dict[str, Any]:
    """Return a line for JSON."""
    return {
        "measure": line.measure, "a": line.a, "b": line.b, "difference": line.difference,
        "interval": None if line.low is None else [line.low, line.high], "verdict": line.verdict,
    }  # fmt: skip


def table(lines: Sequence[Line], a: str, b: str) -> Table:
    """Return the comparison as a table of at most 80 columns."""
    rows = []
    for line in lines:
        span = "-" if line.low is None else f"{shown(line.low, 1)} to {shown(line.high, 1)}"
        digits = 0 if isinstance(line.a, int) else 1
        cells = [shown(value, digits) for value in (line.a, line.b, line.difference)]
        rows.append((_label(line.measure), *cells, span, "-" if line.low is None else line.verdict))
    heads, caption = (
        ("times in ms", "A", "B", "B - A", "interval", "verdict"),
        "intervals: 95 %, over the requests of one run each",
    )
    return table_of(f"A: {a}\nB: {b}", heads, rows, words=["verdict"], caption=caption, **PLAIN)


def _label(measure: str) -> str:
    statistic, _, name = measure.removesuffix("_ms").partition("_")
    return f"{NAMES[name]} {statistic}" if name in NAMES else NAMES[measure]

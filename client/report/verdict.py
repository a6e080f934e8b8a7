"""Two runs of the same arrivals, measure by measure: is the difference more than chance? Pure.

Requests are paired by their index, since both runs sent the same ones, and drawn again in blocks of neighbours
(`figures.blocks`); 95 % intervals. One run each says nothing about the spread from run to run: figures of a
whole run (throughput) have no interval here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from . import figures
from .tables import shown

SAME = "not distinguishable"
WHOLE = ("output_throughput", "request_throughput", "request_goodput", "completed", "failed")
Column = list[Any]


class DifferentArrivals(Exception):
    """The runs did not send the same requests at the same times."""


@dataclass(frozen=True, slots=True)
class Line:
    """One measure of two runs: both values, B - A, its interval, and what follows."""

    measure: str
    a: float | None
    b: float | None
    low: float | None = None
    high: float | None = None
    verdict: str = "no interval from one run each"

    @property
    def difference(self) -> float | None:
        """Give B - A."""
        return None if self.a is None or self.b is None else self.b - self.a


def columns(run: Mapping[str, Any]) -> dict[str, Column]:
    """Give each measure's value of each request in ms, None where there is none; of ITL its gaps."""
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
        "itl": [None if e is None or not g else [1000 * gap for gap in g] for e, g in zip(e2els, gaps)],
    }


def compare(a: Mapping[str, Any], b: Mapping[str, Any], different: bool = False, seed: int = 0) -> list[Line]:
    """Compare two results; `DifferentArrivals` unless `different` allows them to be."""
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
            lines += _lines(name, x, y, True, seed)
        else:
            lines += _lines(name, _known(x), _known(y), False, seed)
    for name in WHOLE:
        first, second = a.get(name), b.get(name)
        if first is not None or second is not None:
            lines.append(Line(name, first, second))
    return lines


def _known(values: Column) -> Column:
    return [value for value in values if value is not None]


STATISTICS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda v: float(v.mean()),
    "p50": lambda v: float(np.percentile(v, 50)),
    "p99": lambda v: float(np.percentile(v, 99)),
}


def _lines(name: str, x: Column, y: Column, paired: bool, seed: int) -> list[Line]:
    if not x or not y:
        return []
    take = _pooled if isinstance(x[0], list) else _picked
    everybody = [take(values, range(len(values))) for values in (x, y)]
    found = {k: (f(everybody[0]), f(everybody[1])) for k, f in STATISTICS.items()}
    if min(len(x), len(y)) < figures.FEWEST_REQUESTS:
        few = f"fewer than {figures.FEWEST_REQUESTS} requests"
        return [Line(f"{k}_{name}_ms", p, q, verdict=few) for k, (p, q) in found.items()]
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(figures.resamples(max(len(x), len(y)))):
        at = figures.blocks(len(x), rng)
        other = at if paired else figures.blocks(len(y), rng)
        p, q = take(x, at), take(y, other)
        drawn.append([f(q) - f(p) for f in STATISTICS.values()])
    low, high = np.percentile(drawn, figures.TAILS, axis=0)
    return [
        Line(f"{k}_{name}_ms", p, q, float(lo), float(hi), _verdict(p, float(lo), float(hi)))
        for (k, (p, q)), lo, hi in zip(found.items(), low, high)
    ]


def _picked(values: Column, at: Iterable[int]) -> np.ndarray:
    return np.asarray(values, float)[np.fromiter(at, int)]


def _pooled(values: Column, at: Iterable[int]) -> np.ndarray:
    return np.concatenate([values[i] for i in at])


def _verdict(a: float, low: float, high: float) -> str:
    """Say who is faster, if the interval of the difference leaves no doubt."""
    if low <= 0 <= high:
        return SAME
    share = f" by {min(abs(low), abs(high)) / a:.0%} or more" if a else ""
    return ("B is slower" if low > 0 else "B is faster") + share


def as_dict(line: Line) -> dict[str, Any]:
    """Give a line as JSON has it."""
    return {
        "measure": line.measure, "a": line.a, "b": line.b, "difference": line.difference,
        "interval": None if line.low is None else [line.low, line.high], "verdict": line.verdict,
    }  # fmt: skip


def table(lines: Sequence[Line], a: str, b: str) -> Table:
    """Lay the comparison out for people."""
    result = Table(title=f"A: {a}\nB: {b}", title_justify="left")
    result.add_column("measure")
    for head in ("A", "B", "B - A", "95 % interval"):
        result.add_column(head, justify="right")
    result.add_column("verdict")
    for line in lines:
        span = "-" if line.low is None else f"{shown(line.low)} to {shown(line.high)}"
        cells = (shown(line.a), shown(line.b), shown(line.difference), span)
        result.add_row(line.measure, *cells, line.verdict)
    return result

"""Statistics that a run is judged by: fits, fairness, and the uncertainty of a figure. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_RESAMPLES = 1000
MAX_DRAWS = 3_000_000  # observations drawn in all, so that a long run does not take minutes, and at once
TAILS = (2.5, 97.5)
MIN_REQUESTS = 10
MIN_RUNS = 3
SERVED = 0.9
OVERLOADED = 0.5  # too low to be the effect of the last answers of a short run


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float] | None:
    """Fit y = slope·x + intercept; return slope, intercept and correlation, or None when x does not vary."""
    a, b = np.asarray(x, float), np.asarray(y, float)
    if len(a) < 2 or np.ptp(a) == 0:
        return None
    slope, intercept = np.polyfit(a, b, 1)
    r = float(np.corrcoef(a, b)[0, 1]) if np.ptp(b) else 0.0
    return float(slope), float(intercept), r


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's index (Σx)² / (n·Σx²): 1 when all are equal, 1/n when one has everything."""
    x = np.asarray(values, float)
    square = float((x * x).sum())
    return float(x.sum()) ** 2 / (len(x) * square) if square else None


def mean_p50_p99(values: np.ndarray) -> np.ndarray:
    """Return mean, median and 99th percentile over the last axis, (..., n) to (..., 3)."""
    return np.stack([values.mean(-1), *np.percentile(values, [50, 99], axis=-1)], -1)


def blocks(times: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw (times, count) positions, each row in runs of neighbors, because neighboring requests share a queue."""
    length = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count, (times, -(-count // length)))
    positions: np.ndarray = (starts[..., None] + np.arange(length)).reshape(times, -1) % count
    return positions[:, :count]


def bootstrap(statistic: Callable[..., np.ndarray], *counts: int, seed: int = 0) -> list[tuple[float, float]]:
    """Return the 95 % interval of each value of a statistic.

    The statistic gets drawn positions (times, count) for each of `counts`, the numbers of observations, and returns
    its values (times, n).
    """
    rng = np.random.default_rng(seed)
    times = max(100, min(MAX_RESAMPLES, MAX_DRAWS // max(counts)))
    most = max(1, MAX_DRAWS // max(counts))  # at once, which does not change the draws of one series
    parts = [min(most, times - i) for i in range(0, times, most)]
    values = np.concatenate([statistic(*(blocks(part, count, rng) for count in counts)) for part in parts])
    low, high = np.percentile(values, TAILS, axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high)]


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of independent runs, by Student's t; None for fewer than `MIN_RUNS`.

    From six runs on, its quantile is expanded around the normal one (Abramowitz and Stegun 26.7.5), exact to three digits.
    """
    if len(values) < MIN_RUNS:
        return None
    z, freedom = 1.959964, len(values) - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    t = {2: 4.302653, 3: 3.182446, 4: 2.776445}.get(freedom, t)
    mean, half = float(np.mean(values)), t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def intervals(name: str, seconds: Sequence[float | None]) -> dict[str, object]:
    """Return the intervals in ms of mean, p50 and p99 of a measure with one value per request; None is left out."""
    known = np.array([1000 * value for value in seconds if value is not None])
    keys = [f"{key}_{name}_ms" for key in ("mean", "p50", "p99")]
    if len(known) < MIN_REQUESTS:
        return dict.fromkeys(keys)
    spans = bootstrap(lambda at: mean_p50_p99(known[at]), len(known))
    return {key: list(span) for key, span in zip(keys, spans)}


def is_overloaded(run: Mapping[str, Any], e2els: Sequence[float | None]) -> bool:
    """Return whether requests came faster than they were completed; `e2els` are their latencies in order of arrival."""
    share = served(run)
    return share < OVERLOADED or (share < SERVED and grows(e2els))


def served(run: Mapping[str, Any]) -> float:
    """Return the rate at which a run completed requests, as a share of the rate at which they came; 1 if that is unknown.

    Programs take long even alone. For them, return when the last would end if each ran alone, as a share of the seconds
    of the run.
    """
    if not (each := run.get("program_times")):
        rate = float(run.get("request_rate") or math.inf)
        return float(run["request_throughput"] or 0.0) / rate if rate < math.inf else 1.0
    least = max(one["began_s"] + (one["alone_s"] or 0.0) for one in each)
    return float(least / run["duration"])


def grows(e2els: Sequence[float | None]) -> bool:
    """Return whether the later half of the requests took clearly longer, because the queue was growing."""
    known = [value for value in e2els if value is not None]
    half = len(known) // 2
    return half > 0 and float(np.median(known[half:])) > 1.2 * float(np.median(known[:half]))

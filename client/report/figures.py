"""Statistics that a run is judged by: fits, fairness, and how sure a figure is. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 1000
# Enough resamples of a short run, and no minutes for a long one.
MOST_DRAWS = 3_000_000
TAILS = (2.5, 97.5)
FEWEST_REQUESTS = 10
FEWEST_RUNS = 3


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float] | None:
    """Fit y = slope·x + intercept; give slope, intercept and correlation, None when x does not vary."""
    a, b = np.asarray(x, float), np.asarray(y, float)
    if len(a) < 2 or np.ptp(a) == 0:
        return None
    slope, intercept = np.polyfit(a, b, 1)
    r = float(np.corrcoef(a, b)[0, 1]) if np.ptp(b) else 0.0
    return float(slope), float(intercept), r


def jain(values: Sequence[float]) -> float | None:
    """Give Jain's index (Σx)² / (n·Σx²): 1 when all get the same, 1/n when one gets all."""
    x = np.asarray(values, float)
    square = float((x * x).sum())
    return float(x.sum()) ** 2 / (len(x) * square) if square else None


def blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the places of one resample: runs of neighbours, since neighbours share a queue."""
    length = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count, -(-count // length))
    return ((starts[:, None] + np.arange(length)).ravel() % count)[:count]


def resamples(count: int) -> int:
    """Say how often to draw from so many observations."""
    return max(100, min(RESAMPLES, MOST_DRAWS // count))


def interval(
    statistic: Callable[[np.ndarray], float | None], count: int, seed: int = 0, independent: bool = False
) -> tuple[float, float] | None:
    """Bootstrap the 95 % interval of a statistic of `count` observations, given the places drawn.

    Circular block bootstrap over requests, or, when they are `independent` runs, the plain one.
    None with fewer than 10 requests or 3 runs.
    """
    if count < (FEWEST_RUNS if independent else FEWEST_REQUESTS):
        return None
    rng = np.random.default_rng(seed)
    values = [
        statistic(rng.integers(0, count, count) if independent else blocks(count, rng)) for _ in range(resamples(count))
    ]
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = np.percentile(known, TAILS)
    return float(low), float(high)


def intervals(name: str, values: Sequence[float | None], scale: float = 1000) -> dict[str, object]:
    """Give intervals of mean, p50 and p99 of a measure with one value a request, None left out."""
    known = np.array([value * scale for value in values if value is not None])
    keys = [f"{key}_{name}_ms" for key in ("mean", "p50", "p99")]
    if len(known) < FEWEST_REQUESTS:
        return dict.fromkeys(keys)
    rng = np.random.default_rng(0)
    drawn = np.empty((resamples(len(known)), 3))
    for row in drawn:
        picked = known[blocks(len(known), rng)]
        row[0] = picked.mean()
        row[1:] = np.percentile(picked, [50, 99])
    low, high = np.percentile(drawn, TAILS, axis=0)
    return {key: [float(a), float(b)] for key, a, b in zip(keys, low, high)}

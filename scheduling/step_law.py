"""How long a step takes by its number of rows, learned from the steps that were computed. Pure.

A straight line through the means of the latest steps of each size, and what each mean is off from it, the more of it the
more steps the mean is of: a mean of few steps is noise, and a choice among many sizes would fall for the luckiest. What is
used is refreshed by its use, so that the law follows contexts that grow and machines that slow down.
"""

from __future__ import annotations

from collections.abc import Callable

LATEST = 32  # steps that a mean is of
TRUSTED = 8  # steps after which half of what a mean is off from the line counts
OUTLYING = 1.5  # times what was expected, above which a step counts as long as that
SINGLY = 64  # sizes up to here have a mean each, larger ones share one in ranges of a sixteenth
EXPIRY = 4096  # steps after which a mean that was not refreshed is dropped
REFIT = 16  # steps between two fits of the line
FREE_ROWS = 12  # rows that take about as long to compute as the weights take to read


class StepLaw:
    """Seconds by rows."""

    def __init__(self) -> None:
        self._steps = 0
        self._means: dict[int, list[float]] = {}  # by size: seconds, steps that they are the mean of, the latest step
        self._line = (0.0, 0.0)
        self._fitted_at = -REFIT

    def learn(self, rows: int, seconds: float) -> None:
        """Note that a step of so many rows took so long; a clock that stood still says nothing."""
        if seconds <= 0:
            return
        self._steps += 1
        size = _size(rows)
        mean = self._means.get(size)
        if mean is None:
            if self._means:
                seconds = min(seconds, 2 * OUTLYING * max(self._at(rows), min(m[0] for m in self._means.values())))
            self._means[size] = [seconds, 1.0, self._steps]
            self._fitted_at = -REFIT
            return
        if mean[1] > 2:
            seconds = min(seconds, OUTLYING * mean[0])
        mean[1] = min(mean[1] + 1, LATEST)
        mean[0] += (seconds - mean[0]) / mean[1]
        mean[2] = self._steps
        if self._steps % EXPIRY == 0:
            self._means = {n: m for n, m in self._means.items() if self._steps - m[2] < EXPIRY}

    def from_rows(self, least: int) -> Callable[[int], float]:
        """Return the law for steps of `least` rows and more, in which more rows never take less time."""
        known = {least: self._at(least)}
        longest, last = known[least], least

        def seconds(rows: int) -> float:
            nonlocal longest, last
            while last < rows:
                last += 1
                longest = max(longest, self._at(last))
                known[last] = longest
            return known[rows]

        return seconds

    def seconds(self, rows: int, unknown: float) -> float:
        """Return how long a step of so many rows takes, `unknown` before the first step."""
        return self._at(rows) if self._means else unknown

    def _at(self, rows: int) -> float:
        if self._steps - self._fitted_at >= REFIT:
            self._fit()
        at_zero, slope = self._line
        expected = at_zero + slope * rows
        mean = self._means.get(_size(rows))
        if mean is None:
            return expected
        return expected + mean[1] / (mean[1] + TRUSTED) * (mean[0] - expected)

    def _fit(self) -> None:
        """Fit the line by least squares, each mean with the weight of its steps; 1 where nothing is known."""
        self._fitted_at = self._steps
        points = [(size, mean[0], mean[1]) for size, mean in self._means.items()]
        weight = sum(w for _, _, w in points)
        if not points:
            self._line = (1.0, 0.0)
            return
        mean_size, mean_seconds = sum(n * w for n, _, w in points) / weight, sum(s * w for _, s, w in points) / weight
        spread = sum(w * (n - mean_size) ** 2 for n, _, w in points)
        together = sum(w * (n - mean_size) * (s - mean_seconds) for n, s, w in points)
        # A step has a part that does not depend on its rows, and each row takes some time. Where sizes hardly differ,
        # what is usual holds: reading the weights takes as long as computing a few rows with them.
        proportional = mean_seconds / mean_size
        usual = proportional * mean_size / (mean_size + FREE_ROWS)
        slope = (together + usual * mean_size**2) / (spread + mean_size**2)
        slope = min(max(slope, 0.0), proportional)
        self._line = (mean_seconds - slope * mean_size, slope)


def _size(rows: int) -> int:
    """Return the size under which steps of so many rows are noted."""
    if rows <= SINGLY:
        return rows
    step = 1 << (rows.bit_length() - 5)
    return rows // step * step

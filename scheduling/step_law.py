"""How long a step takes by its number of rows, learned from the steps that were computed. Pure.

It is a straight line through the usual times of all sizes, corrected for each size by its own distance from the line.
The more steps of a size were seen, the more of this distance counts: that of a few steps is noise, and whoever chooses
among many sizes would fall for the luckiest. The usual time is the slowest of the fastest third, since whatever
disturbs a step makes it slower. Sizes that are used are measured again, so the law follows contexts that grow and
machines that slow down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LATEST = 9  # steps of a size that are looked at
MOST_WEIGHT = 32  # of a size, in steps
TRUSTED = 8  # steps after which half of what a size is off from the line counts
OUTLYING, FEW = 2.0, 3  # times what was expected, above which the first few steps of a size count as long as that
SINGLY = 64  # sizes up to here are apart, larger ones together in ranges of a sixteenth
EXPIRY = 4096  # steps after which a size that was not refreshed is dropped
REFIT = 16  # steps between two fits of the line
FREE_ROWS = 12  # rows that take about as long to compute as the weights take to read


class StepLaw:
    """Seconds by rows."""

    def __init__(self) -> None:
        self._steps = 0
        self._sizes: dict[int, _Size] = {}
        self._line = (0.0, 0.0)
        self._fitted_at = -REFIT

    @property
    def steps(self) -> int:
        """How many steps it has learned from."""
        return self._steps

    def learn(self, rows: int, seconds: float) -> None:
        """Note that a step of so many rows took so long; a clock that stood still says nothing."""
        if seconds <= 0:
            return
        self._steps += 1
        size = self._sizes.get(_size(rows))
        # The first steps of a size are often slow: code is compiled and memory is touched for the first time.
        if size is None or size.steps < FEW:
            if self._sizes:
                seconds = min(seconds, OUTLYING * self._at(rows))
            size = self._sizes.setdefault(_size(rows), _Size())
            self._fitted_at = -REFIT
        size.add(seconds, self._steps)
        if self._steps % EXPIRY == 0:
            self._sizes = {n: size for n, size in self._sizes.items() if self._steps - size.latest < EXPIRY}

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
        return self._at(rows) if self._sizes else unknown

    def _at(self, rows: int) -> float:
        if self._steps - self._fitted_at >= REFIT:
            self._fit()
        at_zero, slope = self._line
        expected = at_zero + slope * rows
        size = self._sizes.get(_size(rows))
        if size is None:
            return expected
        return expected + size.steps / (size.steps + TRUSTED) * (size.seconds - expected)

    def _fit(self) -> None:
        """Fit the line by least squares, each size with the weight of its steps; 1 where nothing is known."""
        self._fitted_at = self._steps
        points = [(n, size.seconds, float(size.steps)) for n, size in self._sizes.items()]
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


class _Size:
    """The latest steps of a size; `steps` counts them up to MOST_WEIGHT, `latest` is the number of the last one."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=LATEST)
        self.seconds, self.steps, self.latest = 0.0, 0, 0

    def add(self, seconds: float, number: int) -> None:
        self._times.append(seconds)
        self.seconds = sorted(self._times)[(len(self._times) - 1) // 3]
        self.steps, self.latest = min(self.steps + 1, MOST_WEIGHT), number


def _size(rows: int) -> int:
    """Return the size under which steps of so many rows are noted."""
    if rows <= SINGLY:
        return rows
    step = 1 << (rows.bit_length() - 5)
    return rows // step * step

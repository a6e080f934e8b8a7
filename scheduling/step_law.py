"""How long a step takes by its number of rows, learned from the steps that were computed. Pure.

Means of the latest steps of each size, and straight lines between them. What is used is refreshed by its use, so that the
law follows contexts that grow and machines that slow down.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

LATEST = 24  # steps that a mean is of
OUTLYING = 2.0  # times the mean, above which a step counts as long as that
SINGLY = 16  # sizes up to here have a mean each, larger ones share one in ranges of an eighth
EXPIRY = 4096  # steps after which a mean that was not refreshed is dropped
FLATNESS = 0.5  # of the slope of a step's time to its rows beyond the largest known size, where one is known


class StepLaw:
    """Seconds by rows."""

    def __init__(self) -> None:
        self._steps = 0
        self._means: dict[int, list[float]] = {}  # by size: seconds, steps that they are the mean of, the latest step
        self._sizes: list[int] = []  # sorted

    def learn(self, rows: int, seconds: float) -> None:
        """Note that a step of so many rows took so long; a clock that stood still says nothing."""
        if seconds <= 0:
            return
        self._steps += 1
        size = _size(rows)
        mean = self._means.get(size)
        if mean is None:
            self._means[size] = [seconds, 1.0, self._steps]
            insort(self._sizes, size)
            return
        if mean[1] > 3:
            seconds = min(seconds, OUTLYING * mean[0])
        mean[1] = min(mean[1] + 1, LATEST)
        mean[0] += (seconds - mean[0]) / mean[1]
        mean[2] = self._steps
        if self._steps % EXPIRY == 0:
            self._sizes = [size for size in self._sizes if self._steps - self._means[size][2] < EXPIRY]
            self._means = {size: self._means[size] for size in self._sizes}

    def from_rows(self, least: int) -> Callable[[int], float]:
        """Return the law for steps of `least` rows and more, in which more rows never take less time."""
        sizes = self._sizes[bisect_left(self._sizes, _size(least)) :]
        first = self._at(least)
        points = [(least, first)]
        for size in sizes:
            if size > least:
                points.append((size, max(points[-1][1], self._means[size][0])))
        beyond = FLATNESS * points[-1][1] / points[-1][0]

        def seconds(rows: int) -> float:
            before = points[0]
            for point in points:
                if point[0] >= rows:
                    if point[0] == before[0]:
                        return point[1]
                    share = (rows - before[0]) / (point[0] - before[0])
                    return before[1] + share * (point[1] - before[1])
                before = point
            return before[1] + beyond * (rows - before[0])

        return seconds

    def seconds(self, rows: int, unknown: float) -> float:
        """Return how long a step of so many rows takes, `unknown` before the first step."""
        return self._at(rows) if self._sizes else unknown

    def _at(self, rows: int) -> float:
        """Return the seconds of a size, between those of its neighbors if it is not known; 1 if none is."""
        size = _size(rows)
        if size in self._means:
            return self._means[size][0]
        if not self._sizes:
            return 1.0
        place = bisect_left(self._sizes, size)
        below, above = self._sizes[max(0, place - 1)], self._sizes[min(place, len(self._sizes) - 1)]
        if below >= size or above <= size or below == above:
            nearest = below if abs(below - size) < abs(above - size) else above
            return self._means[nearest][0]
        share = (size - below) / (above - below)
        return self._means[below][0] * (1 - share) + self._means[above][0] * share


def _size(rows: int) -> int:
    """Return the size under which steps of so many rows are noted."""
    if rows <= SINGLY:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return rows // step * step

"""Prediction intervals: how sure a simulated figure is.

The same simulation is repeated, each time on another machine that the timings allow. One factor slows all steps of a run: the drift
of the machine between runs, and of the law between kinds of steps. A residual slows each step. It is drawn in blocks, because
neighbors are slow together (moving blocks bootstrap: Künsch, Annals of Statistics 17, 1989). This module must not know how a law
was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from costs import cost as costs
from costs.cost import Affine, Cost
from costs.steps import Step, beyond
from simulate.measured.least_squares import law_of
from simulate.simulator import Run

LEVEL = 0.9
SHARES = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)  # of the quantiles
DRAWS = 40
WORST = 20.0  # times too fast, for a law that says hardly more than 0
TINY = 1e-9  # seconds
FLOOR = 2.13  # standard deviations to the end of a 90 % interval, of five errors (Student)
EXTRAPOLATED = 0.1  # standard deviation of the time of a step twice as large as those measured, in logarithms
FARTHEST = 16.0  # times as large as measured, beyond which nothing more is assumed
RATIOS = 2048  # of steps, after which a run draws the same ones again

Seconds = tuple[np.ndarray, np.ndarray]
Figures = Mapping[str, float]


class Interval(NamedTuple):
    """The bounds between which a figure is expected in 90 of 100 runs."""

    low: float
    high: float

    def wider(self, center: float, factor: float) -> Interval:
        """Return the interval with its distances from `center` to the power of `factor`, as ratios."""
        return Interval(center * (self.low / center) ** factor, center * (self.high / center) ** factor)


class Noisy(Cost):
    """A law on one of the machines that the timings allow: each step takes the next ratio of its time.

    A step larger than those `seen` takes longer or shorter by `beyond`, in logarithms, for each doubling.
    """

    name = "noisy"

    def __init__(
        self, law: Cost, ratios: np.ndarray, seen: Mapping[str, int] | None = None, beyond: float = 0.0
    ) -> None:
        self.law, self.seen, self.beyond = law, seen, beyond
        drawn: list[float] = ratios.tolist()
        self._ratios = cycle(drawn)

    def seconds(self, step: Step) -> float:
        seconds = self.law.seconds(step) * next(self._ratios)
        if self.seen and (times := beyond(self.seen, step)) > 1:
            return seconds * math.exp(self.beyond * math.log2(min(times, FARTHEST)))
        return seconds

    def step(self, plan: Any) -> Step:
        return self.law.step(plan)


def statistics(kind: str, seconds: np.ndarray, percents: Sequence[int] = (50, 99)) -> dict[str, float]:
    """Return mean and percentiles under the names of a comparison, such as "p99 latency"; nothing of no times."""
    if not len(seconds):
        return {}
    found = {f"p{percent} {kind}": float(value) for percent, value in zip(percents, np.percentile(seconds, percents))}
    return {f"mean {kind}": float(seconds.mean()), **found}


def figures(run: Run) -> dict[str, float]:
    """Return the figures that get intervals: seconds, under the names of a comparison."""
    return {"makespan": run.makespan, **statistics("latency", run.latency, (99,))}


@dataclass(frozen=True)
class Noise:
    """What a law leaves unexplained, in logarithms of measured over predicted seconds.

    `residuals` are those of single steps, in order; `drift` is the standard deviation of whole groups of steps, found from so many
    `groups`. `floors` are standard deviations of figures in logarithms that come on top, by the last word of a figure's name;
    `widened` is by how much more a law is unsure than its timings show, `seen` the sizes of the steps that were
    measured. `constants` (of TERMS) are those that draws from the same timings say: they agree about steps as most of these are,
    and less so about others. Without any, those of the law are exact.
    """

    residuals: tuple[float, ...]
    drift: float
    groups: int
    floors: Mapping[str, float] = field(default_factory=dict)
    widened: float = 1.0
    seen: Mapping[str, int] = field(default_factory=dict)
    constants: Sequence[Sequence[float]] = ()

    @classmethod
    def of(cls, groups: Iterable[Seconds]) -> Noise:
        """Estimate it from the predicted and the measured seconds of steps that are slow together: a run, or a kind of step."""
        logs = [(np.log(measured / predicted), measured.sum() / predicted.sum()) for predicted, measured in groups]
        totals = np.log([total for _, total in logs])
        residuals = np.concatenate([log - total for (log, _), total in zip(logs, totals)])
        drift = math.sqrt(float((totals**2).sum()) / max(1, len(totals) - 1))
        return cls(tuple(residuals.tolist()), drift, len(totals))

    def factors(self, shares: Any) -> np.ndarray:
        """Return these quantiles of how much longer the steps of another run take (Student's prediction interval)."""
        return np.exp(self.drift * math.sqrt(1 + 1 / self.groups) * self._student(shares))

    def _student(self, shares: Any) -> np.ndarray:
        from scipy.special import stdtrit  # which takes longer to load than most commands of the simulator take

        return np.asarray(stdtrit(max(1, self.groups - 1), np.asarray(shares)))

    def laws(self, law: Cost, draws: int = DRAWS) -> Iterator[Cost]:
        """Yield the law on so many machines, whose drifts are evenly spread quantiles."""
        rng = np.random.default_rng(draws)
        residuals = np.array(self.residuals)
        length = max(1, round(len(residuals) ** (1 / 3)))  # Künsch's order
        shares = (np.arange(draws) + 0.5) / draws
        guesses = EXTRAPOLATED * self._student(shares)
        for number, (factor, guess) in enumerate(zip(self.factors(shares), guesses)):
            starts = rng.integers(0, len(residuals), -(-RATIOS // length))
            drawn = residuals[(starts[:, None] + np.arange(length)).ravel() % len(residuals)]
            if self.constants and isinstance(law, Affine):
                law = law_of(np.array(self.constants[number % len(self.constants)]), law)
            yield Noisy(law, factor * np.exp(drawn), self.seen, float(guess))

    def intervals(
        self,
        replay: Callable[[Cost], Run],
        law: Cost,
        run: Run,
        figures: Callable[[Run], Figures] = figures,
        draws: int = DRAWS,
    ) -> dict[str, Interval]:
        """Return the interval of each figure of `run`, which `replay` gives with `law`, from its runs with other laws."""
        drawn = [figures(replay(noisy)) for noisy in self.laws(law, draws)]
        found = {}
        for name, center in figures(run).items():
            low, high = np.quantile([each[name] for each in drawn], SHARES, method="hazen")  # as the drifts are spread
            floor = FLOOR * self.floors.get(name.split()[-1], 0.0)
            below, above = (
                math.hypot(math.log(max(bound, TINY) / max(center, TINY)), floor)
                for bound in (min(low, center), max(high, center))
            )
            found[name] = Interval(center * math.exp(-below), center * math.exp(above)).wider(center, self.widened)
        return found


def of_points(points: Sequence[Mapping[str, Any]]) -> Noise | None:
    """Return what the timings of a calibration leave unexplained, by points left out of the fit; None for an older file.

    Steps of one size that were timed in one pass are slow together.
    """
    if not points or "held_out" not in points[0]:
        return None
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for turn in ("first", "second"):
        for point in points:
            tokens = point["decodes"] + point["prefills"] * point["chunk"]
            kind = (turn, point["prefills"] > 0, tokens.bit_length())
            groups.setdefault(kind, []).append((max(point["held_out"], point[turn] / WORST), point[turn]))
    pairs = (np.array(group).T for group in groups.values())
    return Noise.of((predicted, measured) for predicted, measured in pairs)


def of_cost(name: str) -> Noise | None:
    """Return the noise of a file that `calibrate` wrote; None for an older file or a named model, whose law is exact."""
    if not name.endswith(".json"):
        return None
    facts = costs.load(name)[2]
    if "noise" in facts:
        return Noise(**{name: value for name, value in facts["noise"].items() if name != "scores"})  # in older files
    return of_points(facts.get("points", ()))

"""What the steps of a server cost: the law of its cost model, or one that is fitted to the steps that it has measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costs import mock
from costs.cost import Cost, Host, Scaled
from costs.steps import Step, size
from simulate.measured import calibrate
from simulate.measured.intervals import Noise

OUTLYING = 6.0  # times as long as others, or as short
MOST_CHOOSING = 500  # steps: with 2,000 a choice takes more than a second


def law(steps: Sequence[tuple[Step, float]], sigma: float, cost: str) -> tuple[Cost, Host, dict[str, Any]]:
    """Return what steps cost, what each turn of the loop adds, and what these rest on.

    `cost` names a mock model, whose law is known and whose steps take a little longer; without one the law is fitted to
    `steps`. Each turn of the loop adds `sigma`. `misfit` is how far the law is off for steps of one size, on average over
    the time of all; the noise of single steps is not in it.
    """
    if mock.is_mock(cost):
        model = mock.load(cost)
        late = float(np.mean([seconds - model.law.seconds(step) for step, seconds in steps])) if steps else 0.0
        return model.law, Host(sigma=sigma + max(0.0, late)), {"from": model.name}
    fitted, error = fit([step for step, _ in steps], [seconds for _, seconds in steps])
    basis = {"from": "steps of this server", "steps": len(steps), "mean_error": error, "misfit": misfit(fitted, steps)}
    return fitted, Host(sigma=sigma), basis


def noise(law: Cost, steps: Sequence[tuple[Step, float]], misfit: float) -> Noise:
    """Return the noise of a law that is fitted to steps.

    The drift is how far the law is off for steps of one size: another policy takes other sizes.
    """
    timed = [steps[i] for i in like_others(*zip(*steps))]
    pairs = np.array([(law.seconds(step), seconds) for step, seconds in timed]).T
    drift = misfit * math.sqrt(math.pi / 2)  # a standard deviation, of a mean absolute error
    return replace(Noise.of([(pairs[0], pairs[1])]), drift=drift, groups=len({size(step) for step, _ in timed}))


def misfit(law: Cost, steps: Sequence[tuple[Step, float]]) -> float:
    """Return the error of a law, scaled to the time of all steps, in the mean of steps of one size, weighted by their time."""
    sums: defaultdict[tuple[bool, int], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for step, seconds in steps:
        sums[size(step)] += (law.seconds(step), seconds)
    predicted, measured = np.array(list(sums.values())).T
    scale = measured.sum() / predicted.sum()
    return float(np.abs(predicted * scale - measured).sum() / measured.sum())


def like_others(steps: Sequence[Step], seconds: Sequence[float]) -> list[int]:
    """Return the indices of the steps that took about as long as others of their class.

    An outlier (the very first step, a process that was stopped) has its cause in the machine, and one such step could
    distort a fit of relative errors.
    """
    groups: dict[tuple[bool, int], list[float]] = {}
    for step, taken in zip(steps, seconds):
        groups.setdefault(size(step), []).append(taken)
    usual = {key: float(np.median(times)) for key, times in groups.items()}
    return [
        i for i, (step, taken) in enumerate(zip(steps, seconds))
        if usual[size(step)] / OUTLYING < taken < usual[size(step)] * OUTLYING
    ]  # fmt: skip


def fit(steps: Sequence[Step], seconds: Sequence[float]) -> tuple[Cost, float]:
    """Fit a law to steps of a server; return it and its mean relative error on them.

    Its form is chosen by some of the steps, evenly spread. A fit of relative errors is too fast when a few steps are slow, so the
    law is scaled to the total time of all steps.
    """
    kept = like_others(steps, seconds)
    steps, measured = [steps[i] for i in kept], np.array([seconds[i] for i in kept])
    some = np.unique(np.linspace(0, len(steps) - 1, MOST_CHOOSING).astype(int))
    form = calibrate.choose([steps[i] for i in some], measured[some]).cost
    fitted = calibrate.fit(steps, measured, form)
    predicted = calibrate.predict(fitted, steps)
    scale = float(measured.sum() / predicted.sum())
    return Scaled(fitted, scale), float(np.abs(predicted * scale / measured - 1).mean())

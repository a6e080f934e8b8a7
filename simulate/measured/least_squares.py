"""The constants of the default law from times: least squares, none below 0, where what is far off counts less.

A row of terms is one step, or the sum of many steps that were timed together. This module must not know where the times
come from, or which switches of the law (knee, chosen, buckets) are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from costs.cost import Affine
from costs.steps import Step

TERMS = ("base", "decode", "prompt", "start", "prefill", "context", "pair", "mask_row_s", "hinge", "experts")
PLAIN = Affine()
FAR = 2.0  # medians of all errors, beyond which a time counts less (Huber)
TRIES = 8
ROUNDING = 1e-9  # relative to the expected error: of data that a law meets exactly


def terms_of(step: Step, law: Affine = PLAIN) -> tuple[float, ...]:
    """Return by what `law` multiplies each of TERMS in a step. Of the law only knee, chosen and buckets matter."""
    rows = law.rows(step) if law.buckets else step.decodes
    tokens = rows + step.prompt
    return (
        1.0, rows, step.prompt, step.prefills, float(step.prompt > 0), step.context, step.pairs, step.masks,
        max(0, tokens - law.knee) if law.knee else 0.0, 1 - (1 - law.chosen) ** tokens,
    )  # fmt: skip


def law_of(constants: np.ndarray, law: Affine = PLAIN) -> Affine:
    """Return `law` with these constants, in the order of TERMS; what follows them is ignored."""
    named: dict[str, Any] = dict(zip(TERMS, map(float, constants)))
    return replace(law, **named)


def solve(
    terms: np.ndarray,
    seconds: np.ndarray,
    error: np.ndarray,
    weight: np.ndarray | None = None,
    prior: np.ndarray | None = None,
    least: float = 0.0,
) -> np.ndarray:
    """Return constants, none below 0, whose products with the rows of `terms` are near `seconds`.

    `terms` is (times, constants). `error` is how far off each time usually is, up to a factor common to all, which is
    found, as `least` at least. `weight` is how much each time counts. Each row of `prior`, times the constants, should
    be 0 give or take 1, and counts as one time does.
    """
    from scipy.optimize import nnls  # which takes longer to load than most commands of the simulator take

    weight = np.ones(len(seconds)) if weight is None else weight
    prior = np.zeros((0, terms.shape[1])) if prior is None else prior
    scale = np.sqrt(weight) / error
    a, b = terms * scale[:, None], seconds * scale
    trust, noise = np.ones(len(b)), least or 1.0
    for _ in range(TRIES):
        x, y = np.vstack([a * trust[:, None], prior * noise]), np.concatenate([b * trust, np.zeros(len(prior))])
        size = np.abs(x).max(axis=0)
        size[size == 0] = 1.0
        found: np.ndarray = nnls(x / size, y)[0] / size
        off = np.abs(terms @ found - seconds) / error
        middle = float(np.median(off[weight > 0])) + ROUNDING
        trusted = np.sqrt(np.minimum(1, FAR * middle / np.maximum(off, ROUNDING)))
        noise = max(least, 1.48 * middle)
        if np.allclose(trust, trusted, rtol=1e-3, atol=0):
            break
        trust = trusted
    return found

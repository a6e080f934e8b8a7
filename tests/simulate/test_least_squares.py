"""The constants of a law from times of steps, of many steps together, with outliers, and with what is usual."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costs.cost import Affine
from costs.steps import Step, decoding
from simulate.measured.least_squares import TERMS, law_of, solve, terms_of

LAW = Affine(
    0.01, 2e-4, 1e-4, 3e-4, 2e-3, 1e-7, 1e-9, 1e-3, 1e-4, 5e-3, knee=40, chosen=1 / 16, buckets=(1, 2, 4, 8, 64)
)
CONSTANTS = np.array([getattr(LAW, name) for name in TERMS])


def steps(number: int) -> list[Step]:
    """Return steps of random sizes, half of them without prompt tokens."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(number):
        rows, prompts = int(rng.integers(0, 80)), max(0, int(rng.integers(-3, 4)))
        chunk = int(rng.integers(1, 200))
        made.append(
            Step(rows, rows * int(rng.integers(1, 900)), prompts, prompts * chunk, prompts * chunk**2 / 2, masks=i % 3)
        )
    return made


def test_the_terms_times_the_constants_are_the_law() -> None:
    for step in steps(200):
        assert np.dot(terms_of(step, LAW), CONSTANTS) == pytest.approx(LAW.seconds(step), rel=1e-12)
        assert np.dot(terms_of(step), CONSTANTS) == pytest.approx(
            replace(LAW, hinge=0, experts=0, buckets=()).seconds(step), rel=1e-12
        )
    assert law_of(CONSTANTS, LAW) == LAW
    assert terms_of(decoding(5, 0), LAW)[1] == 8
    assert terms_of(decoding(65, 0), LAW)[1] == 65


def test_constants_are_found_in_sums_of_steps_though_some_times_have_pauses() -> None:
    rng = np.random.default_rng(1)
    single = np.array([terms_of(step, LAW) for step in steps(3000)])
    sums = np.array([single[start : start + 10].sum(axis=0) for start in range(0, 3000, 10)])
    times = sums @ CONSTANTS
    assert solve(sums, times, np.sqrt(times)) == pytest.approx(CONSTANTS, rel=1e-6)
    times[rng.random(len(times)) < 0.1] += 1.0
    found = solve(sums, times * (1 + 0.001 * rng.standard_normal(len(times))), np.sqrt(times))
    assert sums @ found == pytest.approx(sums @ CONSTANTS, rel=0.01)
    assert found.min() >= 0


def test_what_times_do_not_tell_is_as_usual_and_a_weight_of_0_is_left_out() -> None:
    terms = np.array([[1.0, 8.0]] * 20)  # all steps alike: base and rows are one thing
    times = np.full(20, 0.05)
    times[:5] = 9.0
    prior = np.array([[-1 / 0.01, 1 / 0.001]])  # rows take a tenth of the base
    found = solve(terms, times, np.sqrt(times), np.array([0.0] * 5 + [1.0] * 15), prior, least=0.1)
    assert found == pytest.approx([0.05 / 1.8, 0.005 / 1.8], rel=1e-3)

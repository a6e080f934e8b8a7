"""Speculative shortest job first (arXiv 2404.08509): `sjf` with the guesses of a small model, here a log-normal error.

The paper's predictor puts 81.4 % of requests into the right one of two classes; that is predictor=classes with
accuracy=0.814.
"""

from policies.orders import sjf
from policies.orders._predictions import Predicting
from scheduling.options import Option, options_of

KNOWN = options_of(Predicting)["predictor"]


class Order(sjf.Order):
    predictor = Option("noisy", KNOWN.help, choices=KNOWN.choices)  # type: ignore[assignment]

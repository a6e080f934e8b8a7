"""A lower bound from the best schedules of two or three requests at a time, which know when one must wait for a step's end.

The law must be one in which a step of fewer rows or tokens never takes longer: those of `costs.py` with constants.

* Leaving requests out of a schedule makes no step longer, so the others end no later. So the requests of a group have at
  least the latencies, in sum, of the best schedule of this group alone, and groups without common requests add up.
* Of each request the search sees the first FIRST_TOKENS tokens of the answer. The others take their time alone after these
  at least, so that what a request ends later than alone is at least what its beginning does.
* The search computes prompts as a whole. A request whose prompt is cut takes part in one more step, and so it takes its time
  alone and the cost of one more step at least; the rest of the group is a group, too. So a group's bound is the least one: of the
  search, or for one of the requests, of these costs and the bound of the rest.

Any partition into groups is a bound; groups of neighbors in order of arrival are tried, and the best partition of these counts.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import replace
from functools import cache

import numpy as np

from costs.cost import Affine, Cost, Host, Phases, Scaled
from scheduling.sequence import Sequence
from simulate.best.optimum import Optimum
from simulate.best.shares import shares_of, unwrapped

LARGEST = 3  # requests of a group
FIRST_TOKENS = 4
MOST_REQUESTS = 16  # more take too long, and keep the machine busy, where the other bounds are tighter


def least_in_groups(
    sequences: abc.Sequence[Sequence], cost: Cost, slots: int, host: Host, weights: np.ndarray
) -> float:
    """Return the least mean of weight times latency, without what the host adds once; 0 where this says nothing."""
    law, factor = unwrapped(cost)
    if len(sequences) > MOST_REQUESTS or not isinstance(law, Affine | Phases):
        return 0.0
    cost = Scaled(law, factor)
    order = sorted(range(len(sequences)), key=lambda j: sequences[j].arrived_at)
    shares, fixed = shares_of(cost, slots, host)[0], host.alpha0 + host.alpha1
    short = [replace(sequences[j], max_tokens=min(FIRST_TOKENS, sequences[j].max_tokens)) for j in order]
    heavy = weights[order]
    begun = heavy * [shares.alone(len(s.prompt_ids), s.max_tokens) for s in short]
    rest = heavy * [shares.alone(len(sequences[j].prompt_ids), sequences[j].max_tokens) for j in order] - begun

    @cache
    def least(group: tuple[int, ...]) -> float:
        """Return the least sum over a group of weight times latency, of the answers' beginnings."""
        if len(group) == 1:
            return float(begun[group[0]])
        some = [float(heavy[j]) for j in group]
        whole = (
            Optimum([short[j] for j in group], cost, slots, host).least_weighted(some) * len(group) - sum(some) * fixed
        )
        cut = (
            float(begun[j] + heavy[j] * shares.prefill) + least(tuple(other for other in group if other != j))
            for j in group
            if len(short[j].prompt_ids) > 1
        )
        return min([whole, *cut])

    sums = [0.0]
    for end in range(1, len(order) + 1):
        sums.append(max(sums[start] + least(tuple(range(start, end))) for start in range(max(0, end - LARGEST), end)))
    return (sums[-1] + float(rest.sum())) / len(order)

"""Lower bounds: no policy serves these requests sooner, on this machine and with so many slots.

A policy may do what a scheduler can: admit in any order, cut prompts into pieces, let a sequence pause, wait. It knows all
requests before they arrive. Each output token takes a step of its own; drafts would need other bounds.

The relaxation. Let w_j be the share of request j (`shares.py`): in each step, the shares of the rows sum up to at most the
time that the step takes. Spread the share of each row evenly over its step. Then one machine works on the requests, at a
total rate of at most 1, not before their arrivals; j has all its w_j seconds when its last step ends, at C_j. So:

* Mean latency: on one machine that may interrupt its jobs, shortest remaining processing time first completes k jobs the
  soonest, for each k (Schrage 1968). So the k-th smallest C_j is not smaller.
* Mean latency, again: let M_j be the mean time at which j's seconds are worked on. Weighted sums of the M_j are least if the
  machine always works on the released job with the largest weight per second (Goemans, Queyranne, Schulz, Skutella, Wang
  2002, lemma 4.1). From M_j to C_j it takes at least as long as in a schedule in which j runs alone, since none of its steps
  takes less time than alone.
* Weighted latency: the same lemma, with the weights. And the k-th smallest C_j are at best those of the heaviest requests, in
  the order of their weights; and each request takes its time alone.
* The k-th answer: not before the k-th under shortest remaining first, which is soonest for each k; not before the k-th
  smallest time alone; and, of the requests that arrive at `a` or later, not before `a` and what each row adds to a step for
  k of them, and what steps cost once: those of the longest of these k, or as many as their rows fill. The mean is at least that of the largest of these.
* Weighted and mean latency, of a few requests: the best schedules of two or three at a time (`groups.py`).
* Makespan: what arrives at `a` or later needs the sum of its w_j after `a`; and each request its time alone.
* Deadlines: of the requests that arrive at `a` or later, with deadlines until `b`, those on time have at most b - a seconds
  together. The fewest that are late are found by leaving out the largest; disjoint intervals add up.
"""

from __future__ import annotations

import collections.abc as abc
import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np

from costs.cost import Cost, Host
from scheduling.sequence import Sequence
from simulate.best.groups import least_in_groups
from simulate.best.one_machine import completions, mean_busy_times
from simulate.best.shares import Shares, shares_of

MOST_STARTS = 50  # arrivals from which the requests behind them are looked at
MOST_DEADLINES = 400  # requests with deadlines for which intervals are looked at, whose number grows as the square


@dataclass(frozen=True)
class Bounds:
    """What no policy can beat: seconds, and the number of deadlines missed (None where no request has one).

    `weighted_latency` is the mean of weight times latency; the weights of `bounds` make it the latency per token.
    """

    mean_latency: float
    makespan: float
    weighted_latency: float
    misses: int | None = None


@dataclass(frozen=True)
class Jobs:
    """Requests as one machine sees them, in seconds: arrivals, shares, times alone, and from the mean of a share to its end.

    `own` is the part of the time alone that its rows add to steps, `steps` the part that steps cost once. `rows` are the
    numbers of steps that each takes part in, up to `slots` of them in one, and `step` is what any step costs.
    """

    arrival: np.ndarray
    work: np.ndarray
    alone: np.ndarray
    tail: np.ndarray
    own: np.ndarray
    steps: np.ndarray
    rows: np.ndarray
    slots: int
    step: float
    deadline: np.ndarray


def bounds(
    sequences: abc.Sequence[Sequence],
    cost: Cost,
    slots: int,
    host: Host | None = None,
    page_size: int = 0,
    weights: abc.Sequence[float] | None = None,
) -> Bounds:
    """Return the bounds of sequences for any policy with `slots` slots; `page_size` of a prefix cache, 0 without one.

    Prompt tokens that a sequence found `cached` in its run cost no policy anything. `weights` are those of the weighted
    latency: one over the tokens of each answer by default. ValueError without sequences.
    """
    if not sequences:
        raise ValueError("0 requests have no bounds. Give at least 1")
    host = host or Host()
    ones = np.ones(len(sequences))
    heavy = np.array([1 / max(1, s.max_tokens) for s in sequences] if weights is None else weights, float)
    slots = min(slots, len(sequences))
    views = [jobs_of(sequences, shares, slots, host, page_size) for shares in shares_of(cost, slots, host)]
    late = max(misses(view) for view in views) if any(s.deadline is not None for s in sequences) else None
    fixed = host.alpha0 + host.alpha1
    cached = page_size or any(s.cached for s in sequences)

    def least(of: np.ndarray) -> float:
        apart = 0.0 if cached else least_in_groups(sequences, cost, slots, host, of)
        return max(apart, *(least_weighted(view, of) for view in views)) + fixed * float(of.mean())

    mean = least(ones)
    return Bounds(
        mean_latency=mean,
        makespan=max(map(least_makespan, views)) + fixed,
        weighted_latency=mean if (heavy == 1).all() else least(heavy),
        misses=late,
    )


def jobs_of(sequences: abc.Sequence[Sequence], shares: Shares, slots: int, host: Host, page_size: int = 0) -> Jobs:
    """Return the requests as jobs with these shares."""
    length = np.array([len(s.prompt_ids) for s in sequences], float)
    p = length - np.maximum(shared_prefixes(sequences, page_size), [s.cached for s in sequences])
    m = np.array([max(0, s.max_tokens - 1) for s in sequences], float)
    s1, s2, s3 = m * (m + 1) / 2, m * (m + 1) * (2 * m + 1) / 6, (m * (m + 1) / 2) ** 2
    # The i-th of the m decodes: share row + c i, alone flat + c i, i from 1 to m.
    c = shares.context
    row, flat = shares.row + c * length, shares.alone_row + c * length
    pairs = shares.pair * p * (p + 1) / 2
    first = shares.prompt + shares.token * p + pairs
    first_alone = shares.alone_prompt + shares.alone_token * p + pairs
    decodes, decodes_alone = row * m + c * s1, flat * m + c * s1
    # The sum over i of share i times what is left after the middle of step i: flat (m + 1/2 - i) + c (m (m + 1) / 2 - i^2 / 2).
    left = row * (flat * m * m / 2 + c * (m * s1 - s2 / 2)) + c * (
        flat * ((m + 0.5) * s1 - s2) + c * (s1 * s1 - s3 / 2)
    )
    within = first_alone / 2 if shares.even and not shares.pair else 0.0
    work = first + decodes
    return Jobs(
        arrival=np.array([s.arrived_at for s in sequences], float),
        work=work,
        alone=first_alone + decodes_alone,
        own=first_alone + decodes_alone - shares.prefill - shares.step * m,
        steps=shares.prefill + shares.step * m,
        rows=m + 1,
        slots=slots,
        step=min(shares.step, shares.prefill),
        tail=(first * (decodes_alone + within) + left) / work,
        deadline=np.array(
            [np.inf if s.deadline is None else s.deadline - host.alpha0 - host.alpha1 for s in sequences], float
        ),
    )


def shared_prefixes(sequences: abc.Sequence[Sequence], page_size: int) -> np.ndarray:
    """Return how many prompt tokens of each request another request has too, in full pages: these may be cached."""
    if not page_size:
        return np.zeros(len(sequences))
    users = Counter(key for seq in sequences for key in seq.hashes)
    shared = []
    for seq in sequences:
        alone = next((i for i, key in enumerate(seq.hashes) if users[key] < 2), len(seq.hashes))
        shared.append(min(alone * page_size, len(seq.prompt_ids) - 1))
    return np.array(shared, float)


def least_weighted(jobs: Jobs, weights: np.ndarray) -> float:
    """Return the least mean of weight times latency."""
    answers = np.maximum(completions(jobs.arrival, jobs.work), np.sort(jobs.arrival + jobs.alone))
    answers = np.maximum(answers, answers_by_steps(jobs))
    ends = max(
        (np.sort(weights)[::-1] * answers).sum(),
        (weights * (jobs.arrival + jobs.alone)).sum(),
        (weights * (mean_busy_times(jobs.arrival, jobs.work, weights) + jobs.tail)).sum(),
    )
    return float((ends - (weights * jobs.arrival).sum()) / len(weights))


def answers_by_steps(jobs: Jobs) -> np.ndarray:
    """Return the earliest times of the first, second, ... answer, by the costs of whole steps."""
    n = len(jobs.work)
    soonest = np.zeros(n)
    arrivals = np.unique(jobs.arrival)
    for start in arrivals[:: -(-len(arrivals) // MOST_STARTS)]:
        those = jobs.arrival >= start
        steps = jobs.step * np.ceil(np.cumsum(np.sort(jobs.rows[those])) / jobs.slots)
        times = start + np.cumsum(np.sort(jobs.own[those])) + np.maximum(np.sort(jobs.steps[those]), steps)
        soonest[n - len(times) :] = np.maximum(soonest[n - len(times) :], times)
    return soonest


def least_makespan(jobs: Jobs) -> float:
    """Return the least time from the first arrival to the last answer."""
    order = np.argsort(jobs.arrival)
    arrival = jobs.arrival[order]
    after = np.cumsum(jobs.work[order][::-1])[::-1]
    return float(max((arrival + after).max(), (jobs.arrival + jobs.alone).max()) - arrival[0])


def misses(jobs: Jobs) -> int:
    """Return the fewest requests that end after their deadlines."""
    timed = np.isfinite(jobs.deadline)
    alone_late = jobs.arrival + jobs.alone > jobs.deadline + 1e-9
    hopeless = int(alone_late.sum())
    rows = np.flatnonzero(timed & ~alone_late)
    if not len(rows) or len(rows) > MOST_DEADLINES:
        return hopeless
    rows = rows[np.argsort(jobs.deadline[rows], kind="stable")]
    return hopeless + _late_in_intervals(jobs.arrival[rows], jobs.work[rows], jobs.deadline[rows])


def _late_in_intervals(arrival: np.ndarray, work: np.ndarray, deadline: np.ndarray) -> int:
    """Return the largest sum of requests that must be late over disjoint intervals; rows are in order of their deadlines."""
    best = np.zeros(len(deadline) + 1, int)  # by the number of deadlines that have passed
    for start in sorted(set(arrival.tolist())):
        base = int(best[np.searchsorted(deadline, start, side="right")])
        inside: list[float] = []  # a heap of the negative shares of the requests that are on time
        total, late = 0.0, 0
        for k in range(len(deadline)):
            if arrival[k] >= start:
                heapq.heappush(inside, -float(work[k]))
                total += float(work[k])
                if total > deadline[k] - start + 1e-9:
                    total += heapq.heappop(inside)
                    late += 1
            best[k + 1] = max(best[k + 1], best[k], base + late)
    return int(best[-1])

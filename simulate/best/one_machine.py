"""Schedules of one machine that may interrupt its jobs, for the bounds; this module must not know requests or steps."""

from __future__ import annotations

import heapq

import numpy as np


def completions(arrival: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the completion times, in order, of one machine that always takes the job with the least work left."""
    ends: list[float] = []
    now = 0.0
    open_jobs: list[float] = []  # a heap of the work left in each
    order = np.argsort(arrival, kind="stable")
    starts = arrival[order].tolist()
    for at, job, until in zip(starts, work[order].tolist(), [*starts[1:], np.inf]):
        now = max(now, at)
        heapq.heappush(open_jobs, job)
        while open_jobs and now < until:
            left = heapq.heappop(open_jobs)
            if now + left > until:
                heapq.heappush(open_jobs, left - (until - now))
                now = until
            else:
                now += left
                ends.append(now)
    return np.array(ends)


def mean_busy_times(arrival: np.ndarray, work: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean time at which each job is worked on if the machine takes the released job of least work per weight."""
    means = np.zeros(len(work))
    left = work.tolist()
    open_jobs: list[tuple[float, int]] = []
    order = np.argsort(arrival, kind="stable").tolist()
    ends = [*(float(arrival[j]) for j in order[1:]), np.inf]
    now = 0.0
    for j, until in zip(order, ends):
        now = max(now, float(arrival[j]))
        heapq.heappush(open_jobs, (float(work[j] / weights[j]), j))
        while open_jobs and now < until:
            _, job = open_jobs[0]
            spent = min(left[job], until - now)
            means[job] += spent * (now + spent / 2) / work[job]
            now += spent
            left[job] -= spent
            if left[job] <= 1e-15 or spent == 0.0:
                heapq.heappop(open_jobs)
    return means

"""Another policy, simulated on the requests that a server has just served.

`python -m simulate.measured.shadow` answers questions (see `simulate/measured/observed.py`). It simulates the policy asked for and the served
one too, whose error shows how reliable the rest is. It must not know HTTP, threads, or how requests are observed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from simulate.measured.observed import Observed, converse
from simulate.measured.observed_law import noise
from simulate.scenario import Chosen
from simulate.simulator import Run
from simulate.trace import Trace

DRAWS = 8  # simulations for the intervals: few, because they share a processor with a server


def figures(at: np.ndarray, latency: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Return the figures that are compared, under the names that /stats gives them, of requests that arrived `at`."""
    if not len(tokens):
        raise ValueError("no request was served. Change the policy so that it accepts requests")
    return {
        "makespan": float((at + latency).max() - at.min()),
        "latency-mean": float(latency.mean()),
        "latency-p50": float(np.percentile(latency, 50)),
        "latency-p99": float(np.percentile(latency, 99)),
        "latency-per-token": float((latency / tokens).mean()),
    }


def figures_of(run: Run, trace: Trace) -> dict[str, float]:
    """Return the figures of a simulated run, over the requests that the server answered completely."""
    whole = np.array([trace.seen[int(seq.id)].latency is not None for seq in run.done], bool)
    return figures(run.arrival[whole], run.latency[whole], run.tokens[whole])


def answer_from(rows: dict[str, list[Any]], ask: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the shadow and of the served policy, measured and simulated, and the basis of the cost."""
    server, shadow = Observed.of(rows, ask), Chosen(*ask["shadow"])
    scenario, trace = server.scenario, server.scenario.rows
    timed = [seen for seen in trace.seen if seen.latency is not None]
    real = figures(*(np.array([getattr(s, name) for s in timed]) for name in ("at", "latency", "tokens")))
    other = scenario.serve(shadow)
    simulated = figures_of(scenario.serve(*scenario.policies), trace)
    error = {name: simulated[name] / real[name] - 1 for name in real}
    unexplained = noise(scenario.cost, server.timed, server.basis, server.cost)
    intervals = {}
    if unexplained:
        intervals = unexplained.intervals(
            lambda law: replace(scenario, cost=law).serve(shadow),
            scenario.cost,
            other,
            partial(figures_of, trace=trace),
            DRAWS,
        )
    seen_rows = max((step.rows for step, _ in server.timed), default=0)
    return {
        **figures_of(other, trace),
        "requests": len(timed),
        "real": real,
        "served-simulated": simulated,
        "error": error,
        # The error of the served policy's simulation adds to the noise of the law.
        "intervals": {n: (i.low / (1 + abs(error[n])), i.high * (1 + abs(error[n]))) for n, i in intervals.items()},
        "cost": server.basis,
        "extrapolates": not server.cost and max(seq.batch_max for seq in other.sequences) > seen_rows,
    }


if __name__ == "__main__":
    converse(answer_from)

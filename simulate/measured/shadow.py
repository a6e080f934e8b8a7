"""Another policy, simulated on the requests that a server has just served.

`python -m simulate.measured.shadow` answers questions (see `simulate/measured/observed.py`). It simulates the policy asked for and the served
one too, whose error shows how reliable the rest is. It must not know HTTP, threads, or how requests are observed.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import numpy as np

from costs.steps import Step
from simulate.measured.observed import Chosen, Machine, Seen, converse, seen_in, serve
from simulate.measured.observed_law import law, noise
from simulate.simulator import Run

DRAWS = 8  # simulations for the intervals: few, since a server's processor waits for none of them


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


def figures_of(run: Run, trace: Rows[Seen]) -> dict[str, float]:
    """Return the figures of a simulated run, over the requests that the server answered completely."""
    whole = np.array([trace[int(seq.id)].latency is not None for seq in run.done], bool)
    return figures(run.arrival[whole], run.latency[whole], run.tokens[whole])


def answer(
    trace: Rows[Seen], steps: Rows[tuple[Step, float]], *, shadow: Chosen, served: Chosen,
    machine: Machine, sigma: float = 0.0, cost: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of `shadow`, of `served` as it was and as it is simulated, and what they rest on (see `law`)."""
    trace = sorted(trace, key=lambda seen: seen.at)
    cost_of, host, basis = law(steps, sigma, cost)
    timed = [seen for seen in trace if seen.latency is not None]
    real = figures(*(np.array([getattr(s, name) for s in timed]) for name in ("at", "latency", "tokens")))
    other, own = (serve(trace, policy, machine, cost_of, host) for policy in (shadow, served))
    simulated = figures_of(own, trace)
    error = {name: simulated[name] / real[name] - 1 for name in real}
    unexplained = noise(cost_of, steps, basis, cost)
    intervals = {}
    if unexplained:
        intervals = unexplained.intervals(
            lambda law: serve(trace, shadow, machine, law, host),
            cost_of,
            other,
            partial(figures_of, trace=trace),
            DRAWS,
        )
    seen_rows = max((step.rows for step, _ in steps), default=0)
    return {
        **figures_of(other, trace),
        "requests": len(timed),
        "real": real,
        "served-simulated": simulated,
        "error": error,
        # Beyond the law's noise, the simulation of the served policy shows what else it does not know.
        "intervals": {n: (i.low / (1 + abs(error[n])), i.high * (1 + abs(error[n]))) for n, i in intervals.items()},
        "cost": basis,
        "extrapolates": not cost and max(seq.batch_max for seq in other.sequences) > seen_rows,
    }


def answer_from(rows: dict[str, list[Any]], ask: dict[str, Any]) -> dict[str, Any]:
    return answer(
        *seen_in(rows),
        shadow=Chosen(*ask["shadow"]),
        served=Chosen(*ask["served"]),
        machine=Machine(*ask["machine"]),
        sigma=ask["sigma"],
        cost=ask["cost"],
    )


if __name__ == "__main__":
    converse(answer_from)

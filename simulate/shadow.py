"""Another policy, simulated on the requests that a server has just served.

`python -m simulate.shadow` answers questions, one after the other, until its input ends: lines of JSON with rows
("requests" and "steps", in pieces) and then one with "ask". It simulates the policy asked for and the served one too,
whose error shows how reliable the rest is. It must not know HTTP, threads, or how requests are observed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TextIO, cast

import numpy as np

import policies
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import calibrate, costs, mock
from simulate.costs import Affine, Cost, Host, Scaled
from simulate.simulator import Run, simulate
from simulate.steps import Step, size

LOWEST_PRIORITY = 19
OUTLYING = 6.0  # times as long as others, or as short
TERMS = ("base", "prefill", "token", "hinge", "row", "context", "pair")


class Seen(NamedTuple):
    """A finished request: its arrival, its lengths, and its latency in seconds (None: the answer was incomplete).

    `pages` names its full pages, of prompt and answer, by numbers, equal where their tokens and all before them are.
    """

    at: float
    prompt: int
    tokens: int
    latency: float | None
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    open_ended: bool = False
    pages: Rows[int] = ()


@dataclass(frozen=True)
class Machine:
    """The engine: slots, tokens per step, and KV pages (0: no pages)."""

    slots: int
    tokens_per_step: int = 2048
    pages: int = 0
    page_size: int = 16


@dataclass(frozen=True)
class Chosen:
    """A policy by its name, with its options."""

    name: str
    options: dict[str, Any]


def sequences(trace: Iterable[Seen]) -> list[Sequence]:
    """Return fresh sequences; each requests as many tokens as it received."""
    return [
        Sequence(
            [0] * seen.prompt, seen.tokens, id=str(i), arrived_at=seen.at, client=seen.client,
            priority=seen.priority, deadline=seen.deadline, open_ended=seen.open_ended,
            hashes=[page.to_bytes(8, "big") for page in seen.pages],
        )
        for i, seen in enumerate(trace)
    ]  # fmt: skip


def serve(trace: Rows[Seen], policy: Chosen, machine: Machine, cost: Cost, host: Host, *, records: bool = False) -> Run:
    """Simulate one policy on the trace; with `records`, keep the Iteration of each step."""
    instance = policies.get_policy(policy.name, machine.slots, policy.options)
    pages = PagePool(machine.pages + 1, machine.page_size) if machine.pages else None
    return simulate(Scheduler(instance, pages, machine.tokens_per_step), sequences(trace), cost, host, records=records)


def like_others(steps: Rows[Step], seconds: Rows[float]) -> list[int]:
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


def fit(steps: Rows[Step], seconds: Rows[float]) -> tuple[Affine, float]:
    """Fit the default law to steps of a server; return it and its mean relative error on them.

    A fit of relative errors is too fast when a few steps are slow, so the law is scaled to the total time of all steps.
    """
    kept = like_others(steps, seconds)
    steps, measured = [steps[i] for i in kept], np.array([seconds[i] for i in kept])
    fitted = calibrate.fit(steps, measured)
    predicted = calibrate.predict(fitted, steps)
    scale = float(measured.sum() / predicted.sum())
    scaled = replace(fitted, **{term: getattr(fitted, term) * scale for term in TERMS})
    return scaled, float(np.abs(predicted * scale / measured - 1).mean())


def figures(latency: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Return the figures that are compared, under the names that /stats gives them."""
    if not len(tokens):
        raise ValueError("no request was served. Change the policy so that it accepts requests")
    return {
        "latency-p50": float(np.percentile(latency, 50)),
        "latency-p99": float(np.percentile(latency, 99)),
        "latency-per-token": float((latency / tokens).mean()),
    }


def figures_of(run: Run, trace: Rows[Seen]) -> dict[str, float]:
    """Return the figures of a simulated run, over the requests that the server answered completely."""
    whole = np.array([trace[int(seq.id)].latency is not None for seq in run.done], bool)
    return figures(run.latency[whole], run.tokens[whole])


def answer(
    trace: Rows[Seen], steps: Rows[tuple[Step, float]], *, shadow: Chosen, served: Chosen,
    machine: Machine, sigma: float = 0.0, cost: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of `shadow`, of `served` as it was and as it is simulated, and what they rest on (see `law`)."""
    trace = sorted(trace, key=lambda seen: seen.at)
    cost_of, host, basis = law(steps, sigma, cost)
    timed = [seen for seen in trace if seen.latency is not None]
    real = figures(np.array([s.latency for s in timed]), np.array([s.tokens for s in timed]))
    other, own = (serve(trace, policy, machine, cost_of, host) for policy in (shadow, served))
    simulated = figures_of(own, trace)
    seen_rows = max((step.rows for step, _ in steps), default=0)
    return {
        **figures_of(other, trace),
        "requests": len(timed),
        "real": real,
        "served-simulated": simulated,
        "error": {name: simulated[name] / real[name] - 1 for name in real},
        "cost": basis,
        "extrapolates": not cost and max(seq.batch_max for seq in other.sequences) > seen_rows,
    }


def main() -> None:
    converse(_answer_from)


def converse(
    answer_from: Callable[[dict[str, list[Any]], dict[str, Any]], dict[str, Any]],
    lines: Iterable[str] = sys.stdin,
    out: TextIO = sys.stdout,
) -> None:
    """Answer questions with a function of the rows and the question; an answer reports what failed."""
    os.nice(LOWEST_PRIORITY)
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for line in lines:
        message = json.loads(line)
        if "ask" not in message:
            for name, piece in message.items():
                rows[name] += piece
            continue
        try:
            result = answer_from(rows, message["ask"])
        except Exception as error:  # a policy may come from anywhere
            result = {"problem": f"{type(error).__name__}: {error}"}
        rows.clear()
        print(json.dumps(result, allow_nan=False), file=out, flush=True)


def seen_in(rows: dict[str, list[Any]]) -> tuple[list[Seen], list[tuple[Step, float]]]:
    """Return the requests and the measured steps that a server has sent."""
    return [Seen(*row) for row in rows["requests"]], [(Step(*row[:-1]), row[-1]) for row in rows["steps"]]


def law(steps: Rows[tuple[Step, float]], sigma: float, cost: str) -> tuple[Cost, Host, dict[str, Any]]:
    """Return what steps cost, what each turn of the loop adds, and what these rest on.

    `cost` is a file of `calibrate` or the name of a mock model, whose law is known and whose steps take a little longer; without
    one the law is fitted to `steps`. Each turn of the loop adds `sigma`. `misfit` is how far the law is off for steps of one
    size, on average over the time of all; the noise of single steps is not in it.
    """
    if mock.is_mock(cost):
        model = mock.load(cost)
        known = Scaled(cast(Cost, model.cost), 1 / model.speed)
        late = float(np.mean([seconds - known.seconds(step) for step, seconds in steps])) if steps else 0.0
        return known, Host(sigma=sigma + max(0.0, late)), {"from": model.name}
    if cost:
        loaded, host, _ = costs.load(cost)
        # The server's times, too, begin and end within it.
        return loaded, replace(host, alpha0=0.0, alpha1=0.0), {"from": os.path.basename(cost)}
    fitted, error = fit([step for step, _ in steps], [seconds for _, seconds in steps])
    basis = {"from": "steps of this server", "steps": len(steps), "mean_error": error, "misfit": misfit(fitted, steps)}
    return fitted, Host(sigma=sigma), basis


def misfit(law: Cost, steps: Rows[tuple[Step, float]]) -> float:
    """Return the error of a law, scaled to the time of all steps, in the mean of steps of one size, weighted by their time."""
    sums: defaultdict[tuple[bool, int], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for step, seconds in steps:
        sums[size(step)] += (law.seconds(step), seconds)
    predicted, measured = np.array(list(sums.values())).T
    scale = measured.sum() / predicted.sum()
    return float(np.abs(predicted * scale - measured).sum() / measured.sum())


def _answer_from(rows: dict[str, list[Any]], ask: dict[str, Any]) -> dict[str, Any]:
    return answer(
        *seen_in(rows),
        shadow=Chosen(*ask["shadow"]),
        served=Chosen(*ask["served"]),
        machine=Machine(*ask["machine"]),
        sigma=ask["sigma"],
        cost=ask["cost"],
    )


if __name__ == "__main__":
    main()

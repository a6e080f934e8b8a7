"""Find the changes that would have served the requests of a log better: many on a part of them, the best on all.

Successive halving (Jamieson and Talwalkar 2016), with intervals at the end: what was served and a change are simulated on the same
machines, which the fit allows, and the interval is that of the ratio. This module must not know which changes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from costs import cost
from costs.steps import Step
from scheduling.hook_limit import HookTimeout
from scheduling.located import described
from simulate.advise.changes import Change, serve, title
from simulate.fitting.fit import GPU, PROCESSOR
from simulate.fitting.fitted import Fitted
from simulate.simulator import Run
from simulate.trace import Trace

PART, FEWEST = 3, 30  # the first look is at a third of the requests, and at 30 and twice the slots or more
BEST, LINES = 3, 6  # changes that are simulated on all requests, beside the best of each kind; and that get intervals
DRAWS = 10  # machines: the outer two have the 5 % and 95 % quantiles of the drift
STEPS = 20_000  # of all machines; in longer runs the noise of single steps averages out, and three machines are enough
LEAST = 0.01  # smaller differences cannot be told
BEYOND = 1.1  # times the rows of a step that the fit saw: more are a guess
STARVES = 2.0  # times the longest latency as served
MET, MEAN, TTFT = "SLO met", "mean latency", "mean TTFT"

Figures = Mapping[str, float]
Trial = tuple[Change, Figures]


@dataclass(frozen=True)
class Costlier(cost.Wrapped):
    """The law, with decodes beyond the largest batch that the fit saw at twice the price."""

    most: int

    def seconds(self, step: Step) -> float:
        seconds = self.law.seconds(step)
        seen = step._replace(decodes=self.most, context=step.context * self.most // max(1, step.decodes))
        return seconds if step.decodes <= self.most else 2 * seconds - self.law.seconds(seen)


def figures_of(ttft: np.ndarray, latency: np.ndarray, tokens: np.ndarray, limits: Figures) -> dict[str, float]:
    """Return the goal first: the share of requests within all limits (seconds: ttft, itl, latency), or the mean latency."""
    times = {"ttft": ttft, "itl": (latency - ttft) / np.maximum(tokens - 1, 1), "latency": latency}
    met = [times[name] <= limit for name, limit in limits.items()]
    goal = {MET: np.all(met, axis=0).mean()} if met else {}
    found = {**goal, MEAN: latency.mean(), "p99 latency": np.percentile(latency, 99), TTFT: ttft.mean()}
    return {name: float(value) for name, value in found.items()}


def figures(run: Run, limits: Figures) -> dict[str, float]:
    """Return the figures of a simulation, with the longest latency and the most rows of a step, 0 of several servers."""
    rows = max((seq.batch_max for seq in run.sequences), default=0)
    times = figures_of(run.ttft, run.latency, run.tokens, limits)
    return {**times, "longest": float(run.latency.max()), "rows": float(rows)}


def growth(name: str, before: Figures, after: Figures) -> float:
    """Return by which share of it a figure grows, or MET by which share of all requests."""
    return after[name] - before[name] if name == MET else after[name] / before[name] - 1


class Search:
    """The changes of a fitted server; `passed` is called after each simulation, `failed` says which failed, and why."""

    def __init__(self, fitted: Fitted, limits: Figures, passed: Callable[[], object] = lambda: None) -> None:
        self.fitted, self.limits, self._passed = fitted, limits, passed
        self.failed: dict[str, str] = {}
        run = serve(fitted, {})
        self.served = figures(run, limits)
        self.names = [name for name in self.served if name not in ("longest", "rows")]
        self._drawn = range(DRAWS) if run.steps * DRAWS <= STEPS else (0, DRAWS // 2, DRAWS - 1)
        self._rows = max(1.0, float(run.tokens.sum()) / run.steps)
        self._again = [figures(serve(fitted, {}, law=law), limits) for law in self._laws()]
        seen = fitted.scenario.rows.seen
        size = max(FEWEST, len(seen) // PART, 2 * fitted.scenario.engine.slots)
        starts = range(0, max(1, len(seen) - size + 1), size // 2)
        busiest = max(starts, key=lambda start: float(run.latency[start : start + size].mean()))
        self._part = Trace(seen[busiest : busiest + size]) if size < len(seen) else None
        self._known: dict[str, Figures] = {}  # of all requests

    def best(self, changes: Iterable[Change], own: Sequence[Change] = ()) -> list[dict[str, Any]]:
        """Return what `advice` says of the best changes and pairs of them, the best first, and of all of the user's `own`."""
        looked = self.tried(changes, self._part)
        kept = [change for change, _ in (*looked[:BEST], *best_of_each(looked)) if change not in own]
        found = self.tried([*own, *(change for i, change in enumerate(kept) if change not in kept[:i])])
        served = self._rank(({}, self.served))
        parts = [trial for trial in best_of_each(found) if self._rank(trial) < served]
        for (one, alone), (other, apart) in combinations(parts, 2):
            pair = self.tried([{**one, **other}])
            found += [trial for trial in pair if all(self._beats(trial[1], each) for each in (alone, apart))]
        found = sorted((trial for trial in found if trial[1] != self.served or trial[0] in own), key=self._rank)
        found = [trial for i, trial in enumerate(found) if trial[0] in own or trial[1] not in [f for _, f in found[:i]]]
        firsts = best_of_each(found)
        lines = sorted(found, key=lambda trial: (trial[0] not in own, trial not in firsts))[:LINES]
        return [self.advice(change) for change, _ in sorted(lines, key=self._rank)]

    def advice(self, change: Change) -> dict[str, Any]:
        """Return a change, its figures, `gains` (by how much each grows, center and 90 % interval), and `notes` on what to mind."""
        ((_, found),) = self.tried([change])
        fitted, notes, gains = self.fitted, [], {}
        rows = fitted.seen.get("decodes", int(self.served["rows"]))
        wide = fitted.log.widening
        drawn = [(before, self._run(change, law=law)) for before, law in zip(self._again, self._laws())]
        if found["longest"] > STARVES * self.served["longest"]:
            times = found["longest"] / self.served["longest"]
            notes.append(f"Requests starve: the longest takes {times:.1f} times as long")
        if found["rows"] > BEYOND * rows:
            notes.append(f"The fit saw {rows} rows a step, and this has up to {found['rows']:.0f}")
            drawn.append((self.served, self._run(change, law=Costlier(fitted.scenario.cost, rows))))
        for law in self._as_likely(change):
            drawn.append((figures(serve(fitted, {}, law=law), self.limits), self._run(change, law=law)))
        for name in self.names:
            center = growth(name, self.served, found)
            off = [0.0, *(growth(name, one, other) - center for one, other in drawn if other)]
            slack = max(LEAST, fitted.misfit["ttft" if name == TTFT else "latency"])
            slack *= 1 if name == MET else 1 + center
            low, high = (center + wide * end for end in (min(off), max(off)))
            gains[name] = (center, low - slack, high + slack)
        return {"title": title(change), "change": change, "figures": found, "gains": gains, "notes": notes}

    def _as_likely(self, change: Change) -> Iterator[cost.Cost]:
        """Yield laws that the log may not tell from the fitted one, and that differ in what the change changes."""
        law = self.fitted.law
        if "tokens_per_step" in change and law.prefill:
            # With one size of chunks, a cost of each chunk and a cost of each token look the same.
            prompts = [each.prompt for each in self.fitted.scenario.rows.seen]
            size = min(self.fitted.scenario.engine.tokens_per_step, float(np.mean(prompts)))
            yield replace(law, prefill=0.0, prompt=law.prompt + law.prefill / size)
        if "slots" in change:  # with one number of rows, so do a cost of each step and a cost of each row
            for part in (GPU["decode"], PROCESSOR["decode"]):
                base = (law.base + law.decode * self._rows) / (1 + part * self._rows)
                prefill = max(0.0, law.prefill + law.base - base)  # a step of a prompt alone takes as long as before
                other = replace(law, base=base, decode=part * base, prefill=prefill)
                found = figures(serve(self.fitted, {}, law=other), self.limits)
                slack = max(LEAST, *self.fitted.misfit.values())
                if all(abs(growth(name, self.served, found)) <= slack for name in self.names):
                    yield other

    def _laws(self) -> list[cost.Cost]:
        laws = [*self.fitted.noise.laws(self.fitted.scenario.cost, DRAWS)]
        return [laws[i] for i in self._drawn]

    def _run(self, change: Change, rows: Trace | None = None, law: cost.Cost | None = None) -> Figures | None:
        """Return the figures of a change; None, and why in `failed`, if it does not serve all requests."""
        name, plain = title(change), rows is None and law is None
        if plain and name in self._known:
            return self._known[name]
        try:
            run = serve(self.fitted, change, rows, law)
            if run.answered < run.requests:
                raise ValueError(f"{run.requests - run.answered:,} requests were refused")
        except (Exception, HookTimeout) as error:  # a policy of the user's own may raise anything, or hang
            self.failed[name] = described(error)
            return None
        finally:
            self._passed()
        found = figures(run, self.limits)
        if plain:
            self._known[name] = found
        return found

    def tried(self, changes: Iterable[Change], rows: Trace | None = None) -> list[Trial]:
        """Return the changes that serve all requests, the best first."""
        trials = ((change, self._run(change, rows)) for change in changes)
        return sorted(((change, found) for change, found in trials if found), key=self._rank)

    def _rank(self, trial: Trial) -> tuple[float, ...]:
        """Sort by what needs no other machine, then by what lets no request starve, then by the goal."""
        change, found = trial
        starves = found["longest"] > STARVES * self.served["longest"]
        return change.get("replicas", 1), starves, -found.get(MET, 0.0), found[MEAN]

    def _beats(self, found: Figures, other: Figures) -> bool:
        return abs(growth(self.names[0], other, found)) > LEAST and self._rank(({}, found)) < self._rank(({}, other))


def best_of_each(trials: Iterable[Trial]) -> list[Trial]:
    """Return the first of the trials that change the same setting."""
    first: dict[str, Trial] = {}
    for trial in trials:
        first.setdefault(next(iter(trial[0])), trial)
    return [*first.values()]

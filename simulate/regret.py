"""How far a simulated run is from what is possible on its requests. This module must not know how bounds are found."""

from __future__ import annotations

from typing import Any

from scheduling.scheduler import Scheduler
from simulate.bounds import bounds
from simulate.costs import Cost
from simulate.optimum import Optimum, is_small
from simulate.simulator import Run


def of(run: Run, cost: Cost, scheduler: Scheduler) -> dict[str, Any]:
    """Return the bounds in milliseconds and seconds, and by which share the run is above them.

    Empty where bounds say nothing about a run: requests were refused, or drafts gave several tokens in a step.
    """
    if run.answered < run.requests or not run.sequences or any(seq.drafted for seq in run.sequences):
        return {}
    slots, budget, pages = scheduler.policy.slots, scheduler.max_tokens_per_step, scheduler.pages
    page_size = pages.page_size if pages is not None and pages.prefix_cache else 0
    least = bounds(run.sequences, cost, slots, run.host, page_size)
    figures: dict[str, Any] = {
        "least_mean_e2el_ms": 1000 * least.mean_latency,
        "least_duration_s": least.makespan,
        "above_least_mean_e2el": float(run.latency.mean()) / least.mean_latency - 1,
        "above_least_duration": run.makespan / least.makespan - 1,
    }
    if least.misses is not None:
        figures["least_deadlines_missed"] = least.misses
    if is_small(run.sequences) and not page_size and sum(len(s.prompt_ids) for s in run.sequences) <= budget:
        best = Optimum(run.sequences, cost, slots, run.host).least_mean()
        figures["best_mean_e2el_ms"] = 1000 * best
        figures["above_best_mean_e2el"] = float(run.latency.mean()) / best - 1
    return figures


def sentence(figures: dict[str, Any]) -> str:
    """Say how far a run is from the bounds, or why there are none."""
    if "least_duration_s" not in figures:
        return "no lower bounds, because requests were refused or got several tokens in a step"
    best = ""
    if "best_mean_e2el_ms" in figures:
        best = f" ({_share(figures['above_best_mean_e2el'])} above the best schedule, {figures['best_mean_e2el_ms']:,.0f} ms)"
    return (
        f"mean latency {_share(figures['above_least_mean_e2el'])} above the lower bound of "
        f"{figures['least_mean_e2el_ms']:,.0f} ms{best}, duration {_share(figures['above_least_duration'])} above that of "
        f"{figures['least_duration_s']:,.1f} s"
    )


def _share(above: float) -> str:
    return f"{round(above, 4) + 0.0:.0%}"

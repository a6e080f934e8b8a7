"""How far a simulated run is from the optimum on its requests. This module must not know how bounds are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from costs.cost import Cost
from scheduling.scheduler import Scheduler
from simulate.best import programs
from simulate.best.bounds import bounds
from simulate.best.clairvoyant import MOST_REQUESTS, Again, parts
from simulate.best.optimum import Optimum, is_small
from simulate.simulator import Run


def of(run: Run, cost: Cost, scheduler: Scheduler, again: Again | None = None) -> dict[str, Any]:
    """Return the bounds in milliseconds and seconds, and by which share the run is above them.

    The share of the mean latency is split by what each kind of decision costs (`clairvoyant.py`), in runs of up to
    1,000 requests, with `again`, which makes a fresh scheduler and requests.
    Of programs, the figures of `programs.py`. Empty where bounds say nothing about a run: requests were refused, or drafts gave several tokens in a step.
    """
    slots, budget, pages = scheduler.policy.slots, scheduler.max_tokens_per_step, scheduler.pages
    page_size = pages.page_size if pages is not None and pages.prefix_cache else 0
    if run.loop is not None:
        return {"programs": programs.of(run, cost, slots, page_size)}
    if run.answered < run.requests or not run.sequences or any(seq.drafted for seq in run.sequences):
        return {}
    known = [
        replace(seq, max_tokens=len(seq.output_ids), output_ids=[], pages=[], waited={}) for seq in run.sequences
    ]  # the lengths that the answers had
    least = bounds(known, cost, slots, run.host, page_size)
    figures: dict[str, Any] = {
        "least_mean_e2el_ms": 1000 * least.mean_latency,
        "least_duration_s": least.makespan,
        "least_latency_per_token_ms": 1000 * least.weighted_latency,
        "above_least_mean_e2el": float(run.latency.mean()) / least.mean_latency - 1,
        "above_least_duration": run.makespan / least.makespan - 1,
        "above_least_latency_per_token": float((run.latency / run.tokens).mean()) / least.weighted_latency - 1,
    }
    if again is not None and run.requests <= MOST_REQUESTS:
        shares = {name: seconds / least.mean_latency for name, seconds in parts(run, cost, again).items()}
        figures["above_by"] = {**shares, "other": figures["above_least_mean_e2el"] - sum(shares.values())}
    if least.misses is not None:
        figures["least_deadlines_missed"] = least.misses
    uncached = not page_size and not any(s.cached for s in known)
    if is_small(known) and uncached and sum(len(s.prompt_ids) for s in known) <= budget:
        best = Optimum(known, cost, slots, run.host).least_mean()
        figures["best_mean_e2el_ms"] = 1000 * best
        figures["above_best_mean_e2el"] = float(run.latency.mean()) / best - 1
    return figures


def sentence(figures: dict[str, Any]) -> str:
    """Say how far a run is from the bounds, or why there are none."""
    if (of := figures.get("programs")) and "least_mean_s" in of:
        return (
            f"mean program time {_share(of['above_least_mean'])} above the lower bound of {of['least_mean_s']:,.2f} s"
        )
    if "least_duration_s" not in figures:
        return "no lower bounds, which need every request kept, answered and given one token in a step"
    parts = {name: _share(share) for name, share in figures.get("above_by", {}).items() if name != "other"}
    by = ", ".join(f"{name} {share}" for name, share in parts.items() if share != "0%")
    best = ""
    if "best_mean_e2el_ms" in figures:
        best = f", {_share(figures['above_best_mean_e2el'])} above the best schedule of {figures['best_mean_e2el_ms']:,.0f} ms"
    return (
        f"mean latency {_share(figures['above_least_mean_e2el'])} above the lower bound of "
        f"{figures['least_mean_e2el_ms']:,.0f} ms{f' ({by})' * bool(by)}{best}, duration "
        f"{_share(figures['above_least_duration'])} above its lower bound of {figures['least_duration_s']:,.1f} s"
    )


def _share(above: float) -> str:
    return f"{round(above, 2) + 0.0:,.0%}"

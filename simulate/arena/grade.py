"""Grade a policy for a lesson: first the laws, then its distance from the best known, on arrivals drawn from a seed.

A plain function of the standard library and the pure packages, so that a page in a browser can call it. This module must not
know command lines, processes or how a policy that never ends is stopped: whoever calls it has to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from scheduling.located import failure
from scheduling.scheduler import Scheduler
from simulate.arena.lessons import COST, LESSONS, Lesson
from simulate.arena.measures import measure
from simulate.laws.check import Progress, check
from simulate.laws.laws import Broken
from simulate.laws.purity import check_source
from simulate.simulator import Run, simulate

CASES, LARGE_CASES = 400, 2
LISTS = 3  # of requests that a policy serves
BOUNDS = {"mean": "least_mean_e2el_ms", "misses": "least_deadlines_missed"}  # of simulate/best/regret.py
WORDS = {
    "mean": "mean latency, s", "p99": "p99 latency, s", "light": "wait of light clients relative to all",
    "misses": "share of deadlines missed",
}  # fmt: skip


@dataclass(frozen=True)
class Grade:
    """What a policy reached; `problem` says in words why it has no score, "" if it has one.

    100 points are the best known, that of the policy `best`, and 0 what first come, first served reaches. `figure` is the
    lesson's, less being better, and `bound` what no policy can beat, where that is known.
    """

    policy: str
    lesson: str
    seed: int
    problem: str = ""
    score: float | None = None
    figure: float | None = None
    fcfs: float | None = None
    best_known: float | None = None
    best: str = ""
    bound: float | None = None


Bounds = Callable[[Run, Any, Scheduler], dict[str, Any]]


def grade(
    policy: str,
    lesson: str,
    seed: int = 0,
    *,
    cases: int = CASES,
    large: int = LARGE_CASES,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    bounds: Bounds | None = None,
    progress: Progress | None = None,
) -> Grade:
    """Grade the policy with this name, or in this file; ValueError for a lesson that does not exist.

    The laws are checked on so many `cases`, whose number `progress` is called with. `make_scheduler` is called before each list of requests. `bounds` is
    `regret.of`, which needs numpy.
    """
    task = LESSONS.get(lesson)
    if task is None:
        raise ValueError(f"there is no lesson {lesson!r}. Use one of: {', '.join(LESSONS)}")
    serve = partial(_serve, task, f"{lesson}:{seed}")
    try:
        if policy.endswith(".py") and Path(policy).is_file():
            check_source(Path(policy))
        verdict = check(policy, cases, seed, make_scheduler=make_scheduler, large=large, progress=progress)
        if verdict.broken is not None:
            return Grade(policy, lesson, seed, str(verdict))
        runs = serve(policy, make_scheduler)
    except Broken as broken:
        return Grade(policy, lesson, seed, f"{policy} breaks a law ({broken.law}): {broken.words}")
    except ValueError as error:  # no such file, no class Policy in it
        return Grade(policy, lesson, seed, str(error))
    best = {name: _figure(task, serve(name)) for name in task.best}
    first = min(best, key=lambda name: best[name])
    mine, fcfs = _figure(task, runs), _figure(task, serve(task.base))
    return Grade(
        policy, lesson, seed, "", 100 * (fcfs - mine) / (fcfs - best[first]), mine, fcfs, best[first], first,
        _bound(task, runs, bounds),
    )  # fmt: skip


def _serve(task: Lesson, seed: str, policy: str, make_scheduler: Callable[..., Scheduler] = Scheduler) -> list[Run]:
    """Serve the lesson's lists of requests; Broken when the policy fails."""
    runs = []
    for number in range(LISTS):
        scheduler = task.scheduler(policy, make_scheduler)
        try:
            runs.append(simulate(scheduler, task.sequences(f"{seed}:{number}"), COST))
        except Exception as error:  # the user's code may raise anything
            raise Broken("no crash", failure(error, scheduler.policy)) from error
    return runs


def _figure(task: Lesson, runs: list[Run]) -> float:
    return fmean(getattr(measure(run), task.field) for run in runs)


def _bound(task: Lesson, runs: list[Run], bounds: Bounds | None) -> float | None:
    """Return the mean of the bounds of the lists, None where the figure has none."""
    if bounds is None or task.field not in BOUNDS:
        return None
    unit = 1000 if task.field == "mean" else len(runs[0].sequences)
    found = [bounds(run, COST, task.scheduler(task.base)) for run in runs]
    values = [figures[BOUNDS[task.field]] for figures in found if BOUNDS[task.field] in figures]
    return sum(values) / unit / len(values) if len(values) == len(runs) else None

"""What the page of the lab asks of the simulator: a race, the records of a run, the laws, a grade. JSON in, JSON out.

The page runs this file in a worker, and CPython gives the same answers, byte for byte. So it must not import numpy, `client`
or whatever else only CPython has, nor call the C library's `log`, `exp` or `cos`, whose last bits differ between systems:
arrivals come from files that `dev/tools/pack_lab.py` made.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import policies
from costs import published
from costs.cost import Host
from scheduling.iteration import Iteration, Plan
from scheduling.located import described, locate_error
from scheduling.scheduler import PolicyError, Scheduler
from scheduling.sequence import Sequence
from simulate.arena import grade as grading
from simulate.arena.lessons import LESSONS
from simulate.laws.check import check
from simulate.laws.laws import Broken
from simulate.laws.purity import check_source
from simulate.measured import lanes
from simulate.simulator import PolicyHangs, Run, Simulation

COST = published.make("distserve-opt13b")
OWN = "my_policy.py"
MOST_STEPS = 5000  # of a lane that are recorded; a page cannot draw more, and its figures are of all steps
TOKENS_PER_STEP = 2048
MOST_POLICIES = 4
TELL_EVERY = 0.5  # seconds
BOUNDS = {
    "count": (1, 2000),
    "rate": (0.01, 1000),
    "slots": (1, 64),
    "seed": (0, 1000),
    "cases": (1, 100_000),
    "large": (0, 100),
}


class Heard(Scheduler):
    """Tells the page from time to time that a step begins: it stops a run of which it hears nothing for five seconds."""

    told_at = 0.0

    def plan(self, now: float) -> Plan | None:
        if sys.platform == "emscripten" and time.monotonic() > Heard.told_at + TELL_EVERY:
            Heard.told_at = time.monotonic()
            os.write(2, b"alive\n")  # which web/lab/worker.js reads
        return super().plan(now)


class Recorded(Simulation):
    """A run that records only its first steps, so that the later ones pass faster."""

    def record(self, iteration: Iteration) -> None:
        super().record(iteration)
        if len(self.result.iterations) >= MOST_STEPS:
            self.records = self.scheduler.record = False


def answer(message: str, folder: str = ".") -> str:
    """Answer one message of the page; what goes wrong is an answer, too, so that the page stays alive.

    `folder` has the workloads, and the user's file while it runs.
    """
    kinds = {"race": race, "records": records, "laws": laws, "grade": grade}
    gc.disable()  # there is no cycle among a million records, and the search for one takes a third of the time
    try:
        asked: dict[str, Any] = json.loads(message)
        _check_numbers(asked)
        return json.dumps(kinds[asked["kind"]](asked, Path(folder)), separators=(",", ":"), allow_nan=False)
    except BaseException as error:  # KeyboardInterrupt and SystemExit, too
        return json.dumps({"error": explain(error)})
    finally:
        gc.enable()


def race(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return lanes in the form of /what-if: figures of the whole run, and records as far as all lanes have some."""
    names = asked["policies"]
    if not 1 <= len(names) <= MOST_POLICIES:
        raise ValueError(f"{len(names)} policies were chosen. Choose 1 to {MOST_POLICIES}")
    runs, closed = [], []
    for name in names:
        scheduler = _scheduler(name, asked, folder)
        simulation = Recorded(scheduler, arrivals(asked, folder), COST, Host(), records=True, fast_forward=True)
        simulation.run()
        runs.append(simulation.result)
        closed.append(scheduler.policy.closed)
    stretches = [lanes.stretches(run.iterations) for run in runs]
    ends = [run.iterations[-1].t for run in runs if len(run.iterations) < run.steps]
    ends += [end for end in (lanes.cut(stretches, lanes.MAX_WEIGHT),) if end is not None]
    end = min(ends, default=None)
    zero = runs[0].began
    return {
        "slots": asked["slots"],
        "requests": [
            {"id": s.id, "t": round(s.arrived_at - zero, 6), "prompt_tokens": len(s.prompt_ids), "output_tokens": s.max_tokens}
            for s in runs[0].sequences
        ],
        "lanes": [
            {**_figures(run), "closed": is_closed,
             "records": lanes.records(steps, zero, end)}
            for run, is_closed, steps in zip(runs, closed, stretches)
        ],
        "cut_s": None if end is None else round(end - zero, 6),
    }  # fmt: skip


def records(asked: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the record of every step of one policy."""
    scheduler = _scheduler(asked["policies"][0], asked, folder)
    simulation = Simulation(scheduler, arrivals(asked, folder), COST, Host(), records=True, fast_forward=False)
    simulation.run()
    return [step.to_dict() for step in simulation.result.iterations]


def laws(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return whether the user's policy keeps the laws, and the checker's words."""
    name = _save(asked["text"], folder)
    verdict = check(name, asked["cases"], make_scheduler=Heard, large=asked["large"])
    return {"kept": verdict.broken is None, "words": str(replace(verdict, policy=OWN))}


def grade(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return whether the user's policy has a score in a lesson, and the score with its parts in words."""
    name, cases, large = _save(asked["text"], folder), asked["cases"], asked["large"]
    found = grading.grade(name, asked["lesson"], asked["seed"], cases=cases, large=large, make_scheduler=Heard)
    if found.problem:
        return {"kept": False, "words": _shown(found.problem)}
    lesson = LESSONS[asked["lesson"]]
    words = (
        f"{found.score:.0f} of 100 points in {lesson.title!r} with seed {found.seed}\n{grading.WORDS[lesson.field]}: "
        f"{found.figure:.3f}; {lesson.base} reaches {found.fcfs:.3f}, and {found.best}, the best known, {found.best_known:.3f}"
    )
    return {"kept": True, "words": words}


def arrivals(asked: dict[str, Any], folder: Path) -> list[Sequence]:
    """Return the requests of a named workload; its times are for one request per second."""
    files = {path.stem: path for path in sorted(folder.glob("workloads/*.json"))}
    if asked["workload"] not in files:
        raise ValueError(f"unknown workload {asked['workload']!r}. Use one of: {', '.join(files)}")
    seeds = json.loads(files[asked["workload"]].read_text("utf-8"))
    if asked["seed"] >= len(seeds):
        raise ValueError(f"seed is {asked['seed']}, but must be from 0 to {len(seeds) - 1}")
    sequences = []
    for i, (at, prompt, output, client, priority, slo) in enumerate(seeds[asked["seed"]][: asked["count"]]):
        now = at / asked["rate"]
        seq = Sequence([0] * prompt, output, id=str(i), arrived_at=now, client=client, priority=priority)
        seq.deadline = now + slo
        sequences.append(seq)
    return sequences


def explain(error: BaseException) -> dict[str, Any]:
    """Return what went wrong in plain words, and the line of the user's file, None if none is known."""
    if isinstance(error, policies.PolicyFileError):
        return {"line": error.line, "words": error.words}
    place = locate_error(error)
    line = place.line if place and Path(place.file).name == OWN else None
    words = described(error)
    if isinstance(error, Broken):
        named = re.search(rf"{OWN}, line (\d+): ", error.words)
        line, words = (int(named[1]), error.words.replace(named[0], "")) if named else (line, error.words)
    elif isinstance(error, KeyboardInterrupt):
        words = "stopped here. If you did not press Stop, a loop may never end"
    elif isinstance(error, PolicyError | PolicyHangs) or (isinstance(error, ValueError) and line is None):
        words = _shown(str(error))
    return {"line": line, "words": words}


def _shown(words: str) -> str:
    """Return a message with the user's file by its name alone."""
    return re.sub(rf"[^\s'+]*/{OWN}", OWN, words)


def _scheduler(name: str, asked: dict[str, Any], folder: Path) -> Scheduler:
    """Return a scheduler with a policy of this name; the name of the user's file stands for its text."""
    is_own = name == OWN
    if is_own:
        name = _save(asked["text"], folder)
    options = asked.get("options", {}).get(name)
    return Heard(policies.get_policy(name, asked["slots"], options, own=is_own), None, TOKENS_PER_STEP)


def _save(source: str, folder: Path) -> str:
    """Write the user's file and return the name of its policy; Broken if it has what no policy may have."""
    path = (folder / OWN).absolute()
    path.write_text(source, "utf-8")
    check_source(path)
    return policies.complete(str(path))


def _check_numbers(asked: dict[str, Any]) -> None:
    for name, (low, high) in BOUNDS.items():
        value = asked.get(name, low)
        if not (isinstance(value, int | float if name == "rate" else int) and low <= value <= high):
            raise ValueError(f"{name} is {value!r}, but must be a number from {low:,} to {high:,}")


def _figures(run: Run) -> dict[str, Any]:
    """Return what the table of a race shows; times are seconds."""
    firsts = [seq.first_token_at - seq.arrived_at for seq in run.done if seq.first_token_at is not None]
    ends = [seq.finished_at - seq.arrived_at for seq in run.done if seq.finished_at is not None]
    tokens = sum(len(seq.output_ids) for seq in run.done)
    figures = {"policy": run.policy, "steps": run.steps, "makespan": run.makespan, "tokens": tokens}
    return {**figures, "ttft": firsts, "latency": ends}

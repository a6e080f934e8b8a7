"""Grade policy files for a lesson: the laws, and a score.

Each file is graded in a process of its own, which ends when one list of requests takes more than LIMIT seconds of computing.
"""

from __future__ import annotations

import csv
import faulthandler
import os
import re
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduling.scheduler import Scheduler
from simulate.arena.grade import CASES, LARGE_CASES, WORDS, Grade, grade
from simulate.arena.lessons import LESSONS, Lesson
from simulate.best import regret
from simulate.commands.arguments import Sections
from simulate.laws.check import Progress
from terminal.console import say, table_of, writable
from terminal.options import FILE, Argument, Choice, Number, Option, Values
from terminal.progress import counted

LIMIT = 10.0  # seconds of processor time for one list of requests, a hundred times what a policy needs
NOTE = "Exit status: 0 when every policy has a score, 1 when one has none, 2 for a wrong command line."


def options() -> Sections:
    """Return the options in sections of the help."""
    titles = ", ".join(f"{name} ({lesson.title})" for name, lesson in LESSONS.items())
    return {
        "arguments": [
            Argument("lesson", titles, Choice(LESSONS, "LESSON"), required=True),
            Argument("policies", "files, or names of policies", nargs=-1, required=True, metavar="POLICY..."),
        ],
        "options": [
            Option("--seed", "seed of the requests, which a teacher keeps secret", Number(0), default=0),
            Option("--csv", "file for a table with a row for each policy", FILE),
        ],
    }


def run(args: Values, console: Console) -> dict[str, Any]:
    """Grade each policy; `good` is false when one has no score."""
    if args.csv:
        writable(args.csv, "--csv")
    cases = dict.fromkeys(args.policies, 0)
    total = len(cases) * (CASES + LARGE_CASES)
    with counted(console, total, "cases tested") as done, ThreadPoolExecutor(os.cpu_count()) as pool:

        def one(policy: str) -> Grade:
            def progress(number: int) -> None:
                cases[policy] = number
                done(sum(cases.values()))

            return grade_apart(policy, args.lesson, args.seed, progress=progress)

        grades = list(pool.map(one, args.policies))
    scored = [found for found in grades if found.score is not None]
    if scored:
        console.print(_table(LESSONS[args.lesson], scored))
    for found in grades:
        if found.problem:
            say(console, found.problem)
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, [field.name for field in fields(Grade)], lineterminator="\n")
            rows.writeheader()
            rows.writerows(map(asdict, grades))
        say(console, f"written: {args.csv}")
    return {"grades": [*map(asdict, grades)], "good": not any(found.problem for found in grades)}


def _table(lesson: Lesson, grades: list[Grade]) -> Table:
    rows = []
    for found in grades:
        figures = (found.figure, found.fcfs, found.best_known, found.bound)
        rows.append(
            [found.policy, f"{found.score:.0f}", *("-" if value is None else f"{value:.3f}" for value in figures)]
        )
    heads = ("policy", "score", "figure", lesson.base, grades[0].best, "lower bound")
    return table_of(f"{lesson.title}: {WORDS[lesson.field]}", heads, rows)


def grade_apart(
    policy: str, lesson: str, seed: int, limit: float = LIMIT, progress: Progress = lambda number: None
) -> Grade:
    """Grade a policy in a process of its own, so that it can be stopped wherever it hangs, also within C."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as stack:
        process = context.Process(target=_grade_here, args=(sender, stack.name, policy, lesson, seed, limit))
        process.start()
        sender.close()
        try:
            while not isinstance(found := receiver.recv(), Grade):
                progress(found)
        except EOFError:  # the process ended without a word
            process.join()
            return Grade(policy, lesson, seed, _why_it_ended(process.exitcode, stack.read(), policy, limit))
        process.join()
    return found


def _grade_here(sender: Connection, stack: str, policy: str, lesson: str, seed: int, limit: float) -> None:
    """Grade a policy and send the grade; SIGPROF writes the stack into a file and ends the process, even in a loop in C."""
    sys.stdout = sys.stderr  # what a policy prints must not get into the result
    with open(stack, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGPROF, file, all_threads=False, chain=True)

        def make_scheduler(*args: Any) -> Scheduler:
            signal.setitimer(signal.ITIMER_PROF, limit)
            return Scheduler(*args)

        signal.setitimer(signal.ITIMER_PROF, limit)  # for the file's own statements
        try:
            found = grade(policy, lesson, seed, make_scheduler=make_scheduler, bounds=regret.of, progress=sender.send)
        except BaseException as error:  # SystemExit, or whatever a policy raises to leave
            found = Grade(policy, lesson, seed, f"{policy} raised {type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sender.send(found)


def _why_it_ended(status: int | None, stack: str, policy: str, limit: float) -> str:
    """Say why a process ended without a grade, with the line of the policy that it was in."""
    places = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack)  # the innermost first
    own = [(line, hook) for file, line, hook in places if Path(file).name == Path(policy).name]
    where = f"{own[0][1]}() of {Path(policy).name}, line {own[0][0]}," if own else policy
    if status == -signal.SIGPROF:
        return f"{where} took more than {limit:g} s of computing. Look for a loop whose condition stays true"
    return f"{where} ended its process with status {status}"

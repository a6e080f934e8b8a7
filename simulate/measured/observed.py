"""What a server has served, as its simulators see it: the requests, the engine, the policy, and what its steps cost.

A simulator is a process that answers questions, one after the other, until its input ends: lines of JSON with rows
("requests" and "steps", in pieces) and then a line with "ask". This module must not know the questions.
"""

from __future__ import annotations

import json
import math
import os
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, TextIO

from costs.drafting import Recorded, RecordedDrafter
from costs.steps import Step
from scheduling.hook_limit import HookTimeout
from scheduling.located import described, locate_error
from scheduling.speculation import Speculator
from scheduling.stretches import Stretch
from simulate.hook_limit import limited
from simulate.measured.observed_law import law
from simulate.scenario import Chosen, EngineSize, Inside, Scenario
from simulate.trace import Seen, Trace

LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class Observed:
    """What a server has sent: the scenario of its policy on its requests, and the steps that it has timed.

    `basis` says what the scenario's cost rests on. `cost` names the server's cost model, "" if it has none. `ids` and
    `stretches`, the requests' names and the steps that served them, are there for questions about single requests.
    """

    scenario: Scenario[Trace]
    timed: Sequence[tuple[Step, float]]
    basis: dict[str, Any]
    cost: str
    ids: list[str]
    stretches: list[Stretch]

    @classmethod
    def of(cls, rows: dict[str, list[Any]], ask: dict[str, Any]) -> Observed:
        """Read what a server has sent (`observe/replay/question.py`)."""
        trace = Trace([Seen(*row) for row in rows["requests"]], closed=not ask.get("engines"))
        timed = [(Step(*row[:-1]), row[-1]) for row in rows["steps"]]
        cost, host, basis = law(timed, ask["sigma"], ask["cost"])
        host = replace(host, late=ask.get("late", False))
        slots, tokens_per_step, pages, page_size, drafts = ask["machine"]

        def speculator() -> Speculator | None:
            drafter = RecordedDrafter({str(i): Recorded.of(seen.drafts) for i, seen in enumerate(trace.seen)})
            return None if drafts == 0 else Speculator(drafter, drafts)

        engine = EngineSize(
            slots,
            tokens_per_step,
            pages * page_size,
            page_size,
            speculator=speculator,
            engines=tuple(ask.get("engines", ())),
        )
        served = (Inside if ask.get("inside") else Chosen)(*ask["served"])
        scenario = Scenario((served,), engine, cost, host, trace, (served.policy(slots),))
        stretches = sorted((Stretch.of_row(row) for row in rows.get("stretches", ())), key=lambda stretch: stretch.t)
        if engine.engines:  # each has numbered its own
            number = 1
            for stretch in stretches:
                stretch.n, number = number, number + stretch.steps
        return cls(scenario, timed, basis, ask["cost"], rows.get("ids", []), stretches)


def seen(at: Iterable[float], steps: Iterable[tuple[float, float]], longest: float = math.inf) -> list[float]:
    """Return when the loop saw requests that arrived `at`, from when its steps began and ended.

    A loop between two steps wakes after at most `longest` seconds, and sees all that came meanwhile at once.
    """
    begins, ends = [*zip(*steps)] or [(), ()]
    places = ((time, bisect_left(begins, time)) for time in at)
    return [
        begins[i] if i < len(begins) and begins[i] - time < longest and (not i or ends[i - 1] <= time) else time
        for time, i in places
    ]


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
            # JSON has no NaN: a browser could read nothing of an answer with one.
            with limited(), redirect_stdout(sys.stderr):  # an answer is a line of stdout, and a policy may print
                text = json.dumps(answer_from(rows, message["ask"]), allow_nan=False)
        except HookTimeout as error:
            text = json.dumps({"problem": f"PolicyFailed: {error}"})
        except Exception as error:  # a policy may come from anywhere
            text = json.dumps({"problem": problem(error)})
        rows.clear()
        print(text, file=out, flush=True)


def problem(error: Exception) -> str:
    """Describe an error by its type and text; if a policy raised it, with the hook, file and line."""
    words = described(error)
    place = locate_error(error)
    if place is None or place.hook == "__init__":  # options are refused there
        return words
    return f"PolicyFailed: the policy failed in the simulation, in {place}: {words}. Correct it, or use another policy"

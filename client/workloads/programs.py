"""Programs: trees and chains of calls, each sent when those that it needs have been answered and its tool is done.

All lengths and tool times are drawn before a run, so that all policies get the same. This module must not know who sends a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from . import catalog
from .catalog import Workload
from .chats import TOOL_SECONDS


class Call(NamedTuple):
    """One call of a program that begins `at`; others are known by their indices, each after all that it needs.

    It is sent `tool_s` seconds after all calls `after` are answered. Its prompt is the conversation of call `on` (None: the run's
    instructions) with its answer, and then `fresh` tokens of its own. Its `session` may go on for `keep_s` seconds after it.
    """

    after: tuple[int, ...]
    tool_s: float
    on: int | None
    fresh: int
    answer: int
    keep_s: float = 0.0
    program: str = ""
    session: str = ""
    at: float = 0.0


def joined(programs: Iterable[tuple[float, Sequence[Call]]]) -> list[Call]:
    """Return the calls of all programs, whose begins and calls these are, in one list."""
    calls: list[Call] = []
    for number, (at, some) in enumerate(programs):
        first, name = len(calls), f"program-{number}"
        for call in some:
            on = None if call.on is None else first + call.on
            session = f"{name}.{len(calls) - first}" if on is None else calls[on].session
            after = tuple(first + parent for parent in call.after)
            calls.append(call._replace(after=after, on=on, program=name, session=session, at=at))
    return calls


def react(rng: np.random.Generator, turns: int = 16) -> list[Call]:
    """Agents of up to T (16) turns, each with the result of a tool; most have few turns."""
    count = min(turns, 1 + int(rng.lognormal(1.0, 1.0)))
    calls: list[Call] = []
    pause = 0.0
    for turn in range(count):
        longest, tool = _tool(rng) if turn < count - 1 else (0.0, 0.0)
        before = turn - 1 if turn else None
        calls.append(Call((turn - 1,) if turn else (), pause, before, _length(rng, 80), _length(rng, 60), longest))
        pause = tool
    return calls


def map_reduce(rng: np.random.Generator, width: int = 8) -> list[Call]:
    """A plan, up to K (8) calls at once on parts of a document, and a call that joins their answers."""
    parts, (_, tool) = int(rng.integers(2, max(2, width) + 1)), _tool(rng)
    mapped = [Call((0,), tool, None, _length(rng, 300), _length(rng, 60)) for _ in range(parts)]
    read = sum(call.answer for call in mapped) + 16
    reduce = Call(tuple(range(1, parts + 1)), 0.0, None, read, _length(rng, 120))
    return [Call((), 0.0, None, _length(rng, 120), _length(rng, 40)), *mapped, reduce]


def thought_tree(rng: np.random.Generator, breadth: int = 4, depth: int = 4) -> list[Call]:
    """Up to D (4) times B (4) continuations at once, and a call that rates them."""
    levels = int(rng.integers(1, depth + 1))
    calls = [Call((), 0.0, None, _length(rng, 120), _length(rng, 40))]
    best = rated = 0
    for _ in range(levels):
        # Each begins with tokens of its own, without which they would share the pages of their answers, too.
        thoughts = range(len(calls), len(calls) + breadth)
        calls += [Call((rated,), 0.0, best, 16, _length(rng, 60)) for _ in thoughts]
        rated = len(calls)
        calls.append(Call(tuple(thoughts), 0.0, None, sum(calls[i].answer for i in thoughts) + 32, 8))
        best = int(rng.integers(thoughts.start, rated))
    return [*calls, Call((rated,), 0.0, best, 16, _length(rng, 100))]


def agents(rng: np.random.Generator) -> list[Call]:
    """Half single questions, the others react, map-reduce and thought-tree."""
    kind = (react, map_reduce, thought_tree, None, None, None)[int(rng.integers(6))]
    return kind(rng) if kind else [Call((), 0.0, None, _length(rng, 80), _length(rng, 100))]


KINDS = {
    "react": Workload(react, "react[:T]", (1000,)),
    "map-reduce": Workload(map_reduce, "map-reduce[:K]", (256,)),
    "thought-tree": Workload(thought_tree, "thought-tree[:B[:D]]", (64, 64)),
    "agents": Workload(agents, "agents"),
}


def draw(spec: str, times: Sequence[float], seed: int) -> list[Call]:
    """Draw a program for each time; ValueError for an unknown kind or numbers out of bounds."""
    name, numbers = catalog.parse(spec, KINDS)
    rngs = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(times)))
    return joined((at, KINDS[name].draw(rng, *numbers)) for at, rng in zip(times, rngs))


def _length(rng: np.random.Generator, median: int) -> int:
    """Draw a length in tokens: log-normal, from an eighth to eight times the median."""
    return int(np.clip(rng.lognormal(np.log(median), 0.7), max(1, median // 8), 8 * median))


def _tool(rng: np.random.Generator) -> tuple[float, float]:
    """Draw a tool: the longest that it may take, and the seconds that this call takes."""
    longest = float(rng.choice(TOOL_SECONDS, p=(0.6, 0.3, 0.1)))
    return longest, longest * float(rng.uniform(0.2, 1.0))

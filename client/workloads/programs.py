"""Programs: trees and chains of calls, each sent when those that it needs have been answered and its tool is done.

All lengths and tool times are drawn before a run, so that all policies get the same. This module must not know who sends a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..data import Call, Chat, Planned
from .arrivals import Arrivals
from .chats import INSTRUCTIONS, TOOL_SECONDS
from .sample import Draw, Workload, parse

TEMPLATE_TOKENS = 64, 16  # at most, that a model's chat template adds to a first message and to a later one


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
    name, numbers = parse(spec, KINDS)
    rngs = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(times)))
    return joined((at, KINDS[name].draw(rng, *numbers)) for at, rng in zip(times, rngs))


def drawn(spec: str, count: int, arrivals: Arrivals, seed: int) -> list[Call]:
    """Draw programs that begin at the times of an arrival process; ValueError as `draw`."""
    return draw(spec, arrivals.times(count, np.random.default_rng([seed, 1])), seed)


def written(calls: Sequence[Call], draw: Draw) -> tuple[list[Planned], list[str]]:
    """Return the calls with text for their tokens, and a note about programs that were left out because they exceed the context.

    ValueError if none fits.
    """
    longest: list[int] = []  # what each call has at most, with its answer
    for call in calls:
        before = INSTRUCTIONS if call.on is None else longest[call.on]
        longest.append(before + TEMPLATE_TOKENS[call.on is not None] + call.fresh + call.answer)
    names, long = {call.program for call in calls}, {c.program for c, n in zip(calls, longest) if n > draw.context}
    kept = [i for i, call in enumerate(calls) if call.program not in long]
    if not kept:
        raise ValueError(
            f"no program fits the context of {draw.context:,} tokens. Use a longer --context or another model"
        )
    new = {old: i for i, old in enumerate(kept)}
    instructions = f"{draw.corpus.piece(draw.rng, INSTRUCTIONS)} "
    planned = []
    for i, call in enumerate(calls[old] for old in kept):
        text = (instructions if call.on is None else "") + draw.corpus.piece(draw.rng, call.fresh)
        on = None if call.on is None else new[call.on]
        own = call._replace(after=tuple(new[parent] for parent in call.after), on=on)
        planned.append(Planned(i, call.at, text, call.answer, chat=Chat(True), call=own))
    note = f"left out {len(long):,} of {len(names):,} programs, which are longer than the context of {draw.context:,} tokens"
    return planned, [note] if long else []


def longest_paths(calls: Sequence[Call], alone: Sequence[float]) -> dict[str, float]:
    """Return the seconds of the longest path of each program, with its tools, from those that each call takes alone."""
    ends: list[float] = []
    longest: dict[str, float] = {}
    for call, seconds in zip(calls, alone):
        ends.append(call.tool_s + max((ends[parent] for parent in call.after), default=0.0) + seconds)
        longest[call.program] = max(longest.get(call.program, 0.0), ends[-1])
    return longest


def _length(rng: np.random.Generator, median: int) -> int:
    """Draw a length in tokens: log-normal, from an eighth to eight times the median."""
    return int(np.clip(rng.lognormal(np.log(median), 0.7), max(1, median // 8), 8 * median))


def _tool(rng: np.random.Generator) -> tuple[float, float]:
    """Draw a tool: the longest that it may take, and the seconds that this call takes."""
    longest = float(rng.choice(TOOL_SECONDS, p=(0.6, 0.3, 0.1)))
    return longest, longest * float(rng.uniform(0.2, 1.0))

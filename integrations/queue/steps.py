"""Reconstructs an upstream's steps once the lengths of the answers in them are known. Pure.

From outside, an answer in one piece has no tokens until its end, one event may carry several tokens, and the tokens of one
step may arrive in several bursts. So the pause before each burst is divided into as many steps as its answers have tokens,
on average, and each answer gets one token in each step, or several if there are very many. A step is passed on once all
requests in it have ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import inf

from scheduling.iteration import Iteration, Member, Members, SlotSteps
from serving.inference import Inference

AT_ONCE, MOST = 64, 10_000  # bursts processed together, and kept for running answers
ROUNDS = 8
MOST_STEPS = 2048  # before a burst: each takes about 40 µs of the loops' thread
AFTER = 1e-6  # seconds, more than the rounding error of a sum of times


class _Answer:
    """An answer that has ended. `begin` is when its first token came if it is a stream, otherwise when it joined."""

    def __init__(self, inference: Inference, late: int, bursts: list[Iteration]) -> None:
        seq = self.seq = inference.sequence
        self.inference, self.prompt, self.tokens = inference, len(seq.prompt_ids), len(seq.output_ids)
        self.joined, first, self.end = seq.scheduled_at or 0.0, seq.first_token_at or 0.0, seq.last_token_at or 0.0
        # An answer in one piece comes as two bursts; the first has one token, which stands for its prompt.
        until, since = bisect_left(bursts, self.end + AFTER, key=_end), bisect_right(bursts, first + AFTER, key=_end)
        self.streams = until - since > 1
        self.begin, late = (first, 0) if self.streams else (self.joined, late)
        self.steps = self.tokens + late - self.streams  # from begin to end
        self._late, self._at = late, 0  # steps before its first token, and steps so far

    def step(self, began: float, ended: float, tokens: int = 1) -> Member | None:
        """Return this answer's record in a step of `tokens` tokens, or None if it is not in the step."""
        if self.joined > ended - AFTER or self.end < began + AFTER:
            return None
        self.steps -= tokens
        length, last = 0, self._late + self.tokens
        if self.begin < ended + AFTER:
            if self._at >= last:
                return None
            self._at = min(self._at + tokens, last)
            length = self.prompt + self._at - 1 - self._late if self._at > self._late else 0
        phase, count = ("decode", tokens) if length > self.prompt else ("prefill", length)
        return Member(self.seq.id, self.seq.slot, phase, count, length, self.prompt + self.tokens)


class Steps:
    """Takes the records of an upstream's bursts, and passes on records of its steps to `tell`."""

    def __init__(self, tell: Callable[[Iteration | None, list[Inference]], None]) -> None:
        self._tell, self._number, self._over = tell, 0, 0.0
        self._bursts: list[Iteration] = []
        self._answers: list[_Answer] = []
        self._open: dict[str, tuple[float, int]] = {}  # of each request that runs: the burst before it, if others ran

    def observe(self, burst: Iteration | None, left: list[Inference]) -> None:
        """Take in a burst and the requests that left; called in the loop's thread."""
        if burst is not None:
            before, late = _end(self._bursts[-1]) if self._bursts else 0.0, len(burst.members) > len(burst.joined)
            for id in burst.preempted:  # the upstream did not take it: it may end at another one
                self._open.pop(id, None)
            self._open.update(dict.fromkeys(burst.joined, (before, int(late))))
            self._bursts.append(burst)
        self._answers += [_Answer(one, self._open.pop(one.id, (0.0, 0))[1], self._bursts) for one in left]
        horizon = min(self._open.values())[0] if self._open and len(self._bursts) < MOST else inf
        count = bisect_right(self._bursts, horizon, key=_end)
        if count >= AT_ONCE or not self._open:
            self._pass_on(count)

    def _pass_on(self, count: int) -> None:
        """Pass on the steps of the first bursts; a pause shorter than half a step is added to the next."""
        began, ended, joined, left = 0.0, inf, list[str](), list[tuple[str, str]]()
        for i, (burst, steps) in enumerate(zip(self._bursts[:count], self._steps())):
            began, ended, joined, left = began or burst.t, _end(burst), joined + burst.joined, left + burst.left
            self._over += steps
            number = max(round(self._over), int(i == count - 1))
            self._over -= number
            there = [a for a in self._answers if a.joined < ended and a.end > began]
            size = -(-number // MOST_STEPS)
            for rest in range(number // max(1, size), 0, -1):
                seconds = (ended - began) / rest
                rows = [row for a in there if (row := a.step(began, began + seconds, size))]
                step = replace(
                    burst, n=self._number, t=began, seconds=seconds, members=Members.of(rows), joined=joined, preempted=[],
                    left=left if rest == 1 else [], slot_steps=SlotSteps(len(rows), idle=max(0.0, sum(burst.slot_steps) - len(rows))),
                )  # fmt: skip
                self._tell(step, [])
                self._number, began, joined = self._number + 1, began + seconds, []
            began, left = (0.0, []) if number else (began, left)
        del self._bursts[:count]
        self._tell(None, [a.inference for a in self._answers if a.end < ended + AFTER])
        self._answers = [a for a in self._answers if a.end >= ended + AFTER]

    def _steps(self) -> list[float]:
        """Return how many steps precede each burst: as streams show them, otherwise to fit the answers in one piece."""
        streams, steps, shown = {a.seq.id for a in self._answers if a.streams}, [], []
        for burst in self._bursts:
            rows = [m for m in burst.members if m.id in streams and (m.tokens or m.phase == "idle")]
            tokens = sum(1 if m.phase == "prefill" else m.tokens for m in rows)
            steps.append(tokens / len(rows) if rows else burst.seconds)
            shown.append(bool(rows))
        ends, whole = [*map(_end, self._bursts)], [a for a in self._answers if not a.streams]
        for a in whole * ROUNDS:
            span = range(bisect_right(ends, a.begin + AFTER), bisect_right(ends, a.end + AFTER))
            free = [i for i in span if not shown[i]]
            due = a.steps - sum(steps[i] for i in span if shown[i])
            total = sum(steps[i] for i in free)
            for i in free if total else ():
                steps[i] *= max(0.1, due) / total
        return steps


class StepsOfEach:
    """The steps of each upstream, from the records of all their bursts."""

    def __init__(self, tell: Callable[[Iteration | None, list[Inference]], None]) -> None:
        self._each: defaultdict[tuple[int, int] | None, Steps] = defaultdict(lambda: Steps(tell))
        self._rows: dict[str, tuple[int, int] | None] = {}  # of the upstream of each request that runs

    def observe(self, burst: Iteration | None, left: list[Inference]) -> None:
        """Take in a burst and the requests that left; called in the loops' thread."""
        if burst is not None:
            self._rows.update(dict.fromkeys(burst.joined, burst.rows))
        gone: dict[tuple[int, int] | None, list[Inference]] = {burst.rows: []} if burst is not None else {}
        for one in left:
            gone.setdefault(self._rows.pop(one.id, None), []).append(one)
        for rows, some in gone.items():
            self._each[rows].observe(burst if burst is not None and burst.rows == rows else None, some)


def _end(burst: Iteration) -> float:
    return burst.t + burst.seconds
